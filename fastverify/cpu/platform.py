"""Entry point of the group `sglang.srt.platforms`: supplies `sgl_kernel` on a CPU.

SGLang resolves its platform while `sglang.srt.utils` is imported, in every process and before
anything imports `sgl_kernel`; the hooks of `sglang.srt.plugins` come too late for that. The wheel
that SGLang depends on holds CUDA kernels only, so without a stand-in no CPU run starts at all.
"""

from __future__ import annotations

import importlib
import os
import sys

CPU_ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"
_PROBE = "verify_tree_greedy_cpu"


def activate() -> None:
    """Put the torch stand-in at `sys.modules["sgl_kernel"]` if a CPU run would lack the module.

    Does nothing unless `SGLANG_USE_CPU_ENGINE=1`, or when an installed `sgl_kernel` has the CPU
    functions. `FASTVERIFY_DISABLE` has no say here: it removes our hooks, and a CPU run without
    them still needs the module. Returns None, which leaves SGLang its own `CpuSRTPlatform`.
    """
    if os.environ.get(CPU_ENGINE_VARIABLE) != "1" or _cpu_build_present():
        return
    # Submodules left behind by a failed import would be mixed with the stand-in.
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    stand_in = importlib.import_module("fastverify.cpu.sgl_kernel")
    stand_in.attach_operators()
    sys.modules["sgl_kernel"] = stand_in


def _cpu_build_present() -> bool:
    """Whether the installed `sgl_kernel` brings CPU operators.

    The CUDA wheel has the same Python names, so only the registered operators tell. Its import
    raises ImportError without a driver and OSError with a broken one.
    """
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError):
        return False
    import torch

    return hasattr(torch.ops.sgl_kernel, _PROBE)
