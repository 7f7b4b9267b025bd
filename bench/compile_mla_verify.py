"""Compile MLA verify kernels for a GPU that is not here: shared memory, registers, spills.

python -m bench.compile_mla_verify             every shipped configuration, on its own chip
python -m bench.compile_mla_verify --all       and every candidate of the tuner, on both
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

import msgspec

from bench.mla_candidates import candidates
from fastverify.attention.ops import body_constants, body_kernel, merge_constants
from fastverify.attention.plan import KernelConfig, MlaVerifyPlan, fit, load_table

CAPABILITY = {"sm90": 90, "sm120": 120}
SMS = {"sm90": 132, "sm120": 188}
POINTERS = {
    "q_ptr": "*bf16", "q_rope_ptr": "*bf16", "table_ptr": "*i32", "table_row_ptr": "*i64",
    "lens_ptr": "*i64", "out_ptr": "*bf16", "partial_ptr": "*bf16", "lse_ptr": "*fp32",
}  # fmt: skip
MASK_POINTERS = {"mask_ptr": "*u8", "mask_indptr_ptr": "*i64", "qo_indptr_ptr": "*i32"}


class Compiled(msgspec.Struct, frozen=True):
    """What the compiler made of one kernel. stack_bytes > 0 means spilled registers."""

    kernel: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    instructions: dict[str, int]


def compile_kernel(plan: MlaVerifyPlan, kernel: str, *, masked: bool = False) -> Compiled:
    """Compile `body` or `merge` of a plan for the plan's architecture, without a GPU."""
    import triton
    from fastverify.kernels.triton import mla_merge
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    stride = plan.latent + plan.rope
    if kernel == "merge":
        function, constants = mla_merge.mla_merge_kernel, merge_constants(plan, True)
        options = {"num_warps": plan.config.merge_warps}
    else:
        function, constants = body_kernel(plan.config), body_constants(plan, stride, True)
        options = {"num_warps": plan.config.warps, "num_stages": plan.config.stages}
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        kind = _argument(name, plan, masked) if name not in constants else "constexpr"
        signature[name] = kind
        if kind == "constexpr" and name not in constants:
            constants[name] = None
        if kind.startswith("*") or name.endswith("_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function,
        signature,
        constexprs={(function.arg_names.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    target = GPUTarget("cuda", CAPABILITY[plan.arch], 32)
    built = triton.compile(source, target=target, options=options | {"launch_pdl": plan.pdl})
    return _inspect(kernel, built.asm["cubin"], built.metadata.shared)


def _argument(name: str, plan: MlaVerifyPlan, masked: bool) -> str:
    if name == "kv_ptr":
        return "*bf16" if plan.kv == "bf16" else "*fp8e4nv"
    if name in POINTERS:
        return POINTERS[name]
    if name in MASK_POINTERS:
        return MASK_POINTERS[name] if masked else "constexpr"
    if name.endswith("scale_ptr"):
        return "constexpr"
    return "fp32" if name.endswith("_scale") else "i32"


def _inspect(kernel: str, cubin: bytes, shared_bytes: int) -> Compiled:
    import triton

    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _output(str(tools / "cuobjdump"), "-res-usage", str(path))
        code = _output(str(tools / "nvdisasm"), str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no register count: {usage[-300:]}")
    names = ("HGMMA", "HMMA", "LDGSTS", "LDSM", "LDS", "STS", "LDL", "STL", "BAR", "SHFL")
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in names}
    # Asynchronous copies narrower than 16 bytes would halve the bandwidth of the key tiles.
    counts["LDGSTS.128"] = len(re.findall(r"\bLDGSTS(?:\.\w+)*\.128\b", code))
    return Compiled(kernel, shared_bytes, int(found[1]), int(found[2]), counts)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def example_plan(config: KernelConfig, arch: str) -> MlaVerifyPlan:
    """A plan of 8 rows x 8 heads: the tile count is no part of the code, so any plan will do."""
    return fit(
        config, arch=arch, sms=SMS[arch], heads=8, rows=8, batch=1, max_context=262144, pdl=True
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also the tuner's candidates")
    parser.add_argument("--arch", choices=sorted(CAPABILITY), help="only this architecture")
    wanted = parser.parse_args(arguments)
    failed = 0
    for arch, section in load_table().items():
        if wanted.arch not in (None, arch):
            continue
        configs = list(section.config) + (candidates(arch) if wanted.all else [])
        for config in dict.fromkeys(configs):
            failed += report(config, arch, section.shared_limit_bytes)
    return 1 if failed else 0


def report(config: KernelConfig, arch: str, limit: int) -> bool:
    """Print one configuration; True when it does not fit or spills."""
    name = (
        f"{arch:6} {config.kv} {config.body:8} tile {config.tile_rows:3} "
        f"M{config.block_m} N{config.block_n} C{config.chunks} W{config.warps} S{config.stages}"
    )
    bad = False
    for kernel in ("body", "merge"):
        try:
            made = compile_kernel(example_plan(config, arch), kernel)
        except Exception as error:  # a candidate may be beyond the compiler: report, go on
            print(f"{name} {kernel}: FAILED {str(error)[-160:]!r}", flush=True)
            return True
        bad |= made.shared_bytes > limit or made.stack_bytes > 0
        print(
            f"{name} {kernel:5} shared {made.shared_bytes:6} regs {made.registers:3} "
            f"stack {made.stack_bytes:3} {made.instructions}",
            flush=True,
        )
    return bad


if __name__ == "__main__":
    sys.exit(main())
