"""MLA verify on a GPU, at real sizes: fp32 references, CUDA graphs, determinism."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from bench.mla_candidates import WGMMA, Line
from fastverify.attention.ops import KV_DTYPES, Workspace, mla_verify
from fastverify.attention.plan import MlaVerifyPlan, arch_name, fit, load_table, plan
from tests.mla_reference import Case, make_case, reference

pytestmark = pytest.mark.gpu

SM_SCALE = 0.0721
# bf16 output and softmax weights; relative to values above 1.
TOLERANCE = 0.02


def arch() -> str:
    return arch_name(torch.cuda.get_device_capability())


def sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def plan_of(case: Case, max_context: int, **change: Any) -> MlaVerifyPlan:
    kv = "fp8" if case.kv.dtype == torch.float8_e4m3fn else "bf16"
    found = plan(
        arch=arch(), sms=sms(), heads=case.q.shape[1], rows=max(case.rows),
        batch=len(case.totals), max_context=max_context, kv=kv, page_size=case.page_size,
    )  # fmt: skip
    if found is None:
        pytest.skip(f"no MLA verify table for {arch()}")
    return msgspec.structs.replace(found, **change)


def run(made: MlaVerifyPlan, case: Case, workspace: Workspace, **options: Any) -> torch.Tensor:
    out = torch.full((*case.q.shape[:2], 512), math.nan, dtype=torch.bfloat16, device="cuda")
    uniform = all(r == made.rows for r in case.rows)
    settings: dict[str, Any] = {
        "q": case.q, "kv": case.kv, "table": case.table, "table_rows": case.table_rows,
        "sm_scale": SM_SCALE, "mask": case.mask, "out": out,
        "qo_indptr": None if uniform else case.qo_indptr,
    }  # fmt: skip
    # Lengths come from the host, which a capture must not: there the caller passes them.
    if "seq_lens" not in options:
        settings["seq_lens"] = case.seq_lens(prefix=True)
    return mla_verify(made, workspace, **(settings | options))


def check(case: Case, got: torch.Tensor, **scales: float) -> None:
    want = reference(case, sm_scale=SM_SCALE, **scales)
    assert torch.isfinite(got.float()).all()
    error = ((got.float() - want).abs() / want.abs().clamp(min=1.0)).max().item()
    assert error <= TOLERANCE


CASES: dict[str, tuple[list[int], list[int], int, dict[str, Any]]] = {
    "verify of four, mixed contexts": ([0, 5, 700, 9000], [4] * 4, 8, {}),
    "one long request": ([70_003], [3], 8, {}),
    "eight rows": ([5000], [8], 8, {}),
    "decode": ([1, 4096, 333], [1] * 3, 8, {}),
    "rows of each request": ([900, 40, 7000], [4, 1, 2], 8, {}),
    "64 heads": ([2500, 12], [4, 4], 64, {}),
    "tree": ([3000, 9], [8, 8], 8, {"tree": True}),
    "pages of 64": ([64, 65, 6400], [2] * 3, 8, {"page_size": 64}),
    "huge scores": ([5000], [8], 8, {"scale": 1e4}),
    "tiny scores": ([5000], [8], 8, {"scale": 1e-6}),
    "many short requests": ([3 + i % 70 for i in range(150)], [3] * 150, 8, {}),
    "fp8": ([4000, 17], [4, 4], 8, {"kv_dtype": KV_DTYPES["fp8"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_fp32(name: str) -> None:
    totals, rows, heads, make = CASES[name]
    reach = 72_000
    case = make_case(totals, rows=rows, heads=heads, max_context=reach, device="cuda", **make)
    made = plan_of(case, reach)
    scales = {"k_scale": 0.5, "v_scale": 2.0} if made.kv == "fp8" else {}
    check(case, run(made, case, Workspace.allocate(made, "cuda"), **scales), **scales)


def test_one_key_dominates() -> None:
    case = make_case([6000], rows=[4], heads=8, device="cuda")
    for key in (0, 3333, 5999):
        slot = case.table[case.table_rows[0], key].long()
        kept = case.kv[slot].clone()
        case.kv[slot, 0] = 4.0 * case.q[3, 0]
        made = plan_of(case, 6000)
        check(case, run(made, case, Workspace.allocate(made, "cuda")))
        case.kv[slot] = kept


@pytest.mark.parametrize("index", range(max(len(s.config) for s in load_table().values())))
def test_every_shipped_configuration(index: int) -> None:
    section = load_table().get(arch())
    if section is None or index >= len(section.config):
        pytest.skip(f"no configuration {index} for {arch()}")
    config = section.config[index]
    rows = max(1, config.tile_rows // 8)
    case = make_case(
        [2000, 30], rows=[rows] * 2, heads=8, device="cuda", kv_dtype=KV_DTYPES[config.kv]
    )
    made = fit(
        config, arch=arch(), sms=sms(), heads=8, rows=rows, batch=2, max_context=2000,
        pdl=section.pdl,
    )  # fmt: skip
    check(case, run(made, case, Workspace.allocate(made, "cuda")))


WGMMA_CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "shorter than a tile": ([5], [4], {}),
    "mixed contexts": ([0, 5, 700, 9000], [4] * 4, {}),
    "rows of each request": ([900, 40, 7000], [4, 1, 2], {}),
    "tree": ([3000, 9], [8, 8], {"tree": True}),
    "pages of 64": ([64, 65, 6400], [2] * 3, {"page_size": 64}),
    "two row tiles": ([4000, 3], [16] * 2, {}),
}


@pytest.mark.parametrize(
    ("name", "line"),
    [*((name, WGMMA[0]) for name in WGMMA_CASES), *(("mixed contexts", w) for w in WGMMA[1:])],
    ids=str,
)
def test_wgmma(name: str, line: Line) -> None:
    """Every wgmma candidate, whatever the table holds: this body has no other test of values."""
    if arch() != "sm90":
        pytest.skip("wgmma is SM90's")
    totals, rows, make = WGMMA_CASES[name]
    case = make_case(totals, rows=rows, heads=8, max_context=9100, device="cuda", **make)
    made = plan_of(case, 9100)
    body, m, n, chunks, warps, stages, per_sm = line
    config = msgspec.structs.replace(
        made.config, body=body, block_m=m, block_n=n, chunks=chunks, warps=warps, stages=stages,
        programs_per_sm=per_sm,
    )  # fmt: skip
    made = fit(
        config, arch=arch(), sms=sms(), heads=8, rows=made.rows, batch=made.batch,
        max_context=9100, page_size=made.page_size, pdl=True,
    )  # fmt: skip
    workspace = Workspace.allocate(made, "cuda")
    first = run(made, case, workspace)
    check(case, first)
    for _ in range(20):
        assert torch.equal(run(made, case, workspace), first)


class Captured:
    """A graph over static tensors, replayed with other lengths."""

    def __init__(self, case: Case, made: MlaVerifyPlan, workspace: Workspace) -> None:
        self.case = case
        self.lens = case.seq_lens(prefix=True)
        self.out = torch.empty((*case.q.shape[:2], 512), dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(made, case, workspace, seq_lens=self.lens, out=self.out)
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            run(made, case, workspace, seq_lens=self.lens, out=self.out)

    def replay(self, totals: list[int]) -> torch.Tensor:
        self.case.totals = totals
        self.lens.copy_(self.case.seq_lens(prefix=True))
        self.out.fill_(math.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out


def test_one_graph_serves_growing_contexts() -> None:
    reach = 40_000
    case = make_case([reach, reach], rows=[4, 4], heads=8, device="cuda")
    made = plan_of(case, reach)
    captured = Captured(case, made, Workspace.allocate(made, "cuda"))
    total = 4
    while total < reach:
        check(case, captured.replay([total, min(reach, 3 * total // 2)]))
        total = total * 2 + 1
    check(case, captured.replay([reach, reach]))
    # Shorter again, and a padded request: nothing of the long replay may remain.
    check(case, captured.replay([77, 4]))


def test_same_bits_every_time() -> None:
    reach = 32_000
    case = make_case([9000, 120, 31_000], rows=[4] * 3, heads=8, max_context=reach, device="cuda")
    made = plan_of(case, reach)
    captured = Captured(case, made, Workspace.allocate(made, "cuda"))
    totals = list(case.totals)
    first = captured.replay(totals).clone()
    for _ in range(200):
        assert torch.equal(captured.replay(totals), first)


def test_workspace_shared_by_interleaved_graphs() -> None:
    """Two plans take turns in one memory, as the graphs of two draft lengths do."""
    reach = 9000
    cases = [
        make_case([8000 + 64 * r], rows=[r], heads=8, max_context=reach, device="cuda", seed=r)
        for r in (2, 4)
    ]
    plans = [plan_of(case, reach) for case in cases]
    memory = torch.empty(max(p.workspace_bytes for p in plans), dtype=torch.uint8, device="cuda")
    graphs = [
        Captured(case, made, Workspace.view(made, memory))
        for case, made in zip(cases, plans, strict=True)
    ]
    wants = [g.replay(list(g.case.totals)).clone() for g in graphs]
    for case, want in zip(cases, wants, strict=True):
        check(case, want)
    for turn in range(60):
        graph, want = graphs[turn % 2], wants[turn % 2]
        assert torch.equal(graph.replay(list(graph.case.totals)), want)


def test_without_early_launch_the_bits_are_the_same() -> None:
    """The order that PDL relaxes is only the launch: results cannot depend on it."""
    case = make_case([9000], rows=[4], heads=8, device="cuda")
    made = plan_of(case, 9000)
    late = msgspec.structs.replace(made, pdl=False)
    workspace = Workspace.allocate(made, "cuda")
    assert torch.equal(run(made, case, workspace), run(late, case, workspace))


def test_back_to_back_calls_do_not_race() -> None:
    """With PDL the next call starts while this one merges; its partials must wait."""
    cases = [make_case([7000], rows=[4], heads=8, device="cuda", seed=s) for s in range(4)]
    made = plan_of(cases[0], 7000)
    workspace = Workspace.allocate(made, "cuda")
    alone = [run(made, case, workspace) for case in cases]
    torch.cuda.synchronize()
    lens = [case.seq_lens(prefix=True) for case in cases]
    outs = [torch.empty_like(out) for out in alone]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(16):
            for case, length, out in zip(cases, lens, outs, strict=True):
                run(made, case, workspace, seq_lens=length, out=out)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for out, want in zip(outs, alone, strict=True):
        assert torch.equal(out, want)
