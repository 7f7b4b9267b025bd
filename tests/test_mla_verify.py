"""MLA verify without a GPU: the kernels in Triton's interpreter, and what the host refuses."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from fastverify.attention.ops import Workspace, mla_verify
from fastverify.attention.plan import MlaVerifyPlan, fit, load_table
from fastverify.errors import ConfigError
from tests.mla_interpreter import CASES, CONFIGS, WIDE_CASES
from tests.mla_reference import Case, make_case

# bf16 weights and output; fp8 values are scaled by up to 3, so their rounding is too.
TOLERANCE = 0.02


@functools.cache
def interpreted() -> dict[str, float | str]:
    """Errors of all cases, from one process that imports Triton as interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mla_interpreter"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


NAMES = [f"chunked: {n}" for n in CASES] + [f"wide: {n}" for n in WIDE_CASES]


@pytest.mark.parametrize("name", NAMES)
def test_interpreter_matches_fp32(name: str) -> None:
    error = interpreted()[name]
    assert isinstance(error, float), error
    assert error <= TOLERANCE


def small() -> tuple[MlaVerifyPlan, Case]:
    case = make_case([30, 12], rows=[2, 2], heads=8, max_context=64)
    config = load_table()["sm90"].config[0]
    plan = fit(config, arch="sm90", sms=132, heads=8, rows=2, batch=2, max_context=64)
    return plan, case


def arguments(case: Case) -> dict[str, Any]:
    return {
        "q": case.q, "kv": case.kv, "table": case.table, "seq_lens": case.seq_lens(prefix=True),
        "table_rows": case.table_rows, "out": torch.empty(4, 8, 512, dtype=torch.bfloat16),
        "sm_scale": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.empty(4, 8, 576)}, "q dtype torch.float32, needs bfloat16"),
        ({"q": torch.empty(5, 8, 576, dtype=torch.bfloat16)}, "query tokens 5, needs at most"),
        ({"q": torch.empty(3, 8, 576, dtype=torch.bfloat16)}, "query tokens 3, needs batch x rows"),
        ({"q": torch.empty(4, 4, 576, dtype=torch.bfloat16)}, "q (4, 4, 512), needs (4, 8, 512)"),
        ({"kv": torch.empty(9, 1, 576)}, "kv dtype torch.float32"),
        ({"kv": torch.empty(9, 1, 512, dtype=torch.bfloat16)}, "kv (9, 512)"),
        ({"kv": torch.empty(9, 1, 1152, dtype=torch.bfloat16)[..., ::2]}, "kv strides"),
        ({"table": torch.zeros(4, 63, dtype=torch.int32)}, "63 keys, needs >= 64"),
        ({"table": torch.zeros(4, 64, dtype=torch.int64)}, "page table dtype torch.int64"),
        ({"table_rows": torch.zeros(1, dtype=torch.int64)}, "page table rows for 1"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int64)}, "seq_lens (3,), needs (2,)"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens dtype torch.float32"),
        ({"out": torch.empty(4, 8, 576, dtype=torch.bfloat16)[..., :512]}, "out strides"),
        ({"qo_indptr": torch.zeros(2, dtype=torch.int32)}, "qo_indptr (2,), needs (3,)"),
        ({"mask": torch.zeros(2, 2, 3, dtype=torch.uint8)}, "mask entries 12, needs"),
        ({"mask": torch.zeros(2, 2, 2)}, "mask dtype torch.float32"),
        ({"mask_indptr": torch.zeros(3)}, "mask_indptr alone"),
        ({"k_scale": torch.ones(2)}, "k_scale entries 2"),
    ],
)
def test_refuses_before_launch(change: dict[str, Any], message: str) -> None:
    plan, case = small()
    workspace = Workspace.allocate(plan, "cpu")
    with pytest.raises(ConfigError) as caught:
        mla_verify(plan, workspace, **(arguments(case) | change))
    assert message in str(caught.value)


def test_workspace_belongs_to_its_plan() -> None:
    plan, case = small()
    other = fit(plan.config, arch="sm90", sms=132, heads=8, rows=3, batch=2, max_context=64)
    with pytest.raises(ConfigError, match="workspace"):
        mla_verify(plan, Workspace.allocate(other, "cpu"), **arguments(case))
    with pytest.raises(ConfigError, match="needs .* bytes"):
        Workspace.view(plan, torch.empty(plan.workspace_bytes - 1, dtype=torch.uint8))
    shared = torch.empty(other.workspace_bytes, dtype=torch.uint8)
    assert Workspace.view(plan, shared).partial.data_ptr() == shared.data_ptr()


def test_configs_of_the_interpreter_are_of_both_triton_bodies() -> None:
    """Gluon has no interpreter: the wgmma body is compiled here and run on a GPU only."""
    bodies = {c.body for section in load_table().values() for c in section.config}
    assert bodies <= set(CONFIGS) | {"wgmma"}
    assert all(msgspec.structs.asdict(c)["body"] == name for name, c in CONFIGS.items())
