"""Compile SGLang's INT4 Marlin MoE modules into its JIT cache, and nothing else.

`python -m bench.prebuild_marlin` compiles the two variants that Kimi-K2.5's experts launch, in
parallel, for the GPU of this machine; they take minutes each, so start it in the background and
do other work meanwhile. `--check` says whether both are built, without compiling (exit 0 or 1).
`--arch 9.0` names another GPU: the link step then needs a libcuda on this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from bench import cli
from fastverify.errors import ConfigError

# `moe_wna16_marlin_gemm` of SGLang 0.5.23 as `fused_marlin_moe` calls it without expert parallel:
# (zero_inactive_output,) differs, the other template arguments are the same for both products.
VARIANTS = {"gate-up": False, "down": True}
LIMIT_S = 1500


def build(variant: str, arch: tuple[int, int] | None) -> None:
    """Load one variant, compiling it if the cache has none."""
    import contextlib

    import torch
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
    from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module

    target = override_jit_cuda_arch(*arch) if arch else contextlib.nullcontext()
    with target:
        _jit_moe_wna16_marlin_module(
            torch.bfloat16,
            False,
            False,
            expert_ids_are_sorted=True,
            zero_inactive_output=VARIANTS[variant],
            has_inactive_prefix_count=True,
        )


def parse_arch(text: str | None) -> tuple[int, int] | None:
    """`9.0` to (9, 0); ConfigError on anything else."""
    if text is None:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ConfigError(f"--arch {text!r}: give a compute capability such as 9.0 or 12.0.")
    return int(major), int(minor)


def main() -> int:
    """Build or check all variants; 0 when they are in the cache."""
    parser = argparse.ArgumentParser(prog="bench.prebuild_marlin", description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not compile")
    parser.add_argument("--arch", help="compute capability, by default this machine's GPU")
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process")
    args = parser.parse_args()
    arch = parse_arch(args.arch)
    if args.check:
        os.environ["SGLANG_CRASH_ON_JIT_COMPILE"] = "1"
    if args.variant:
        try:
            build(args.variant, arch)
        except Exception as error:  # nvcc, a missing library, a missing build: the text says which
            print(f"{args.variant}: {str(error).strip()[-600:]}", file=sys.stderr)
            return 1
        return 0
    # A stopped parent must not leave compilers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    start = time.monotonic()
    flags = [*(["--check"] if args.check else []), *(["--arch", args.arch] if arch else [])]
    children = {
        name: subprocess.Popen([sys.executable, "-m", __spec__.name, "--variant", name, *flags])
        for name in VARIANTS
    }
    failed = 0
    try:
        for name, child in children.items():
            code = child.wait(timeout=max(1.0, start + LIMIT_S - time.monotonic()))
            failed += code != 0
            print(f"{name}: {'ready' if code == 0 else 'not built'}", end=" ", flush=True)
            print(f"after {time.monotonic() - start:.0f} s", flush=True)
    except subprocess.TimeoutExpired:
        print(f"not finished within {LIMIT_S} s; stopped.", file=sys.stderr)
        failed = 1
    finally:
        for child in children.values():
            child.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
