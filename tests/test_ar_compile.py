"""Our all-reduce kernels compiled for SM90 and SM120 on a machine without either.

No register may be spilled, and the PTX must show, access by access, that memory which peers share
is touched at system scope and nothing else is written weakly but the outputs.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastverify.comm import launch as ar
from fastverify.comm.layout import Layout

POINTERS = ("x", "residual", "weight", "out", "residual_out")
NUMBERS = ("slots", "half_bytes", "rank", "rows", "first", "blocks", "limit")
ONE_1, ONE_4 = (ar.Launch(ar.Algorithm.ONE_SHOT, parts) for parts in (1, 4))
TWO_4, TWO_7 = (ar.Launch(ar.Algorithm.TWO_SHOT, parts) for parts in (4, 7))
ISLAND_4 = ar.Launch(ar.Algorithm.ISLAND, 4)
ACCESS = re.compile(r"\b((?:ld|st|atom|red)\.[a-z0-9_.:]*global[a-z0-9_.:]*)")
SHARED = {
    "ld.relaxed.sys.global.v4.b32",
    "ld.relaxed.sys.global.b64",
    "st.relaxed.sys.global.v4.b32",
    "st.relaxed.sys.global.b64",
}
# The call counter and the error word, which only blocks of this rank use.
CONTROL = {"ld.volatile.global.b64", "atom.global.relaxed.gpu.cas.b64"}


def compiled(launch: ar.Launch, world: int, arch: int, *, bf16: bool, fused: bool) -> Any:
    """The kernel as the launcher would compile it for hidden 7168."""
    layout = Layout(world, 7168, 64)
    constants = ar.constants(launch, layout, bf16=bf16, fused=fused)
    peers = 5 if launch.algorithm is ar.Algorithm.ISLAND else world
    signature: dict[str, Any] = dict.fromkeys(POINTERS, "*bf16" if bf16 else "*fp16")
    signature |= {"peers": ("i64",) * peers}
    signature |= dict.fromkeys(NUMBERS, "i32")
    signature |= {"eps": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(POINTERS))}
    source = ASTSource(ar.kernel(launch.algorithm), signature, constants, aligned)
    options = {"num_warps": ar.warps(launch, layout), "maxnreg": ar.MAX_REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize(
    ("launch", "world", "bf16", "fused"),
    [
        (ONE_1, 2, True, True),
        (ONE_1, 8, True, True),
        (ONE_4, 4, True, True),
        (TWO_4, 2, True, False),
        (TWO_4, 8, True, True),
        (TWO_7, 8, False, True),
        (ISLAND_4, 8, True, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_compiles_without_spills_and_with_visible_order(
    launch: ar.Launch, world: int, bf16: bool, fused: bool, arch: int, tmp_path: pathlib.Path
) -> None:
    kernel = compiled(launch, world, arch, bf16=bf16, fused=fused)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "STACK:0 " in usage and "LOCAL:0" in usage, usage

    found = collections.Counter(ACCESS.findall(kernel.asm["ptx"]))
    shared = {name: count for name, count in found.items() if name in SHARED}
    assert {"ld.relaxed.sys.global.v4.b32", "st.relaxed.sys.global.v4.b32"} <= shared.keys()
    weak = set(found) - SHARED - CONTROL
    adds = {name for name in weak if name.startswith("atom") and "relaxed" in name}
    assert weak - adds <= {"ld.global.v4.b32", "st.global.v4.b32"}, found
    layout = Layout(world, 7168, 64)
    owners = {ar.Algorithm.ONE_SHOT: 1, ar.Algorithm.TWO_SHOT: world, ar.Algorithm.ISLAND: 4}
    tile = ar.constants(launch, layout, bf16=bf16, fused=fused)["TILE"]
    units = owners[launch.algorithm] * tile // (32 * ar.warps(launch, layout))
    # Every weak store is to `out` or, fused, to `residual_out`: one each per unit of a thread.
    assert found["st.global.v4.b32"] == units * (2 if fused else 1)
