"""Every shipped MLA verify configuration compiled for its chip, on a machine without one."""

from __future__ import annotations

import pytest

from bench.compile_mla_verify import compile_kernel, example_plan
from fastverify.attention.plan import KernelConfig, load_table

SHIPPED = [
    (arch, config, section.shared_limit_bytes)
    for arch, section in load_table().items()
    for config in section.config
]


def name_of(value: object) -> str:
    if isinstance(value, KernelConfig):
        return f"{value.kv}-tile{value.tile_rows}"
    return str(value)


@pytest.mark.parametrize(("arch", "config", "limit"), SHIPPED, ids=name_of)
def test_fits_its_chip(arch: str, config: KernelConfig, limit: int) -> None:
    plan = example_plan(config, arch)
    body = compile_kernel(plan, "body")
    assert body.shared_bytes <= limit
    assert body.stack_bytes == 0, "registers spill"
    assert body.instructions["HGMMA"] + body.instructions["HMMA"] > 0
    if config.kv == "bf16":
        copies = body.instructions["LDGSTS"]
        assert copies > 0
        assert body.instructions["LDGSTS.128"] == copies, "narrow copies of key tiles"
    merge = compile_kernel(plan, "merge")
    assert merge.stack_bytes == 0
