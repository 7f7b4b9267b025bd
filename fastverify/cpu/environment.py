"""Variables and SGLang arguments of a run without a GPU. Pure values, each with its reason."""

from __future__ import annotations

from fastverify.errors import ConfigError

# Name (arguments without dashes), value (empty for a switch), reason.
Reasoned = tuple[str, str, str]

CONTEXT_LENGTH = 2048
MAX_TOTAL_TOKENS = 8192


def cpu_environment(tp: int, cpu_count: int) -> tuple[Reasoned, ...]:
    """What must stand in the environment before SGLang is imported.

    tp: ranks on this machine. cpu_count: cores that may be used; fewer than `tp` are shared.
    ConfigError when either is below 1.
    """
    for name, value in (("tp", tp), ("cpu_count", cpu_count)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, but a CPU run needs at least 1: raise it.")
    lines = [
        ("SGLANG_USE_CPU_ENGINE", "1", "no GPU here: SGLang takes its CPU branches"),
        ("OMP_NUM_THREADS", "1", "the matrices are too small to pay for waking more threads"),
        ("TORCHDYNAMO_DISABLE", "1", "the first verify step would compile C++ for a minute"),
    ]
    if tp > 1:
        lines += [
            (
                "SGLANG_CPU_OMP_THREADS_BIND",
                "|".join(_cores(rank, tp, cpu_count) for rank in range(tp)),
                "SGLang places one rank on each NUMA node unless it is told the cores",
            ),
            (
                "SGLANG_NCCL_SO_PATH",
                "none",
                "a CUDA build of torch would load NCCL, which has no CPU device; gloo is used",
            ),
        ]
    return tuple(lines)


def _cores(rank: int, tp: int, cpu_count: int) -> str:
    """An equal share of the cores for each rank, or one shared core when there are too few."""
    share = cpu_count // tp
    if share <= 1:
        return str(rank % cpu_count)
    return f"{rank * share}-{(rank + 1) * share - 1}"


def cpu_arguments(tp: int) -> tuple[Reasoned, ...]:
    """The SGLang arguments of a CPU run; the custom all-reduce only matters with several ranks."""
    several = (("disable-custom-all-reduce", "", "the custom all-reduce is a GPU kernel"),)
    return (
        *(several if tp > 1 else ()),
        ("device", "cpu", "no GPU here"),
        ("attention-backend", "intel_amx", "the only CPU backend with EAGLE and MLA"),
        ("dtype", "float32", "exact enough that speculation on and off give equal tokens"),
        ("cuda-graph-backend-decode", "disabled", "no CUDA graphs without CUDA"),
        ("cuda-graph-backend-prefill", "disabled", "no CUDA graphs without CUDA"),
        (
            "max-total-tokens",
            str(MAX_TOTAL_TOKENS),
            "SGLang would size the KV cache by all the memory of the machine",
        ),
        ("context-length", str(CONTEXT_LENGTH), "enough for a trial, small slot tables"),
        ("mem-fraction-static", "0.3", "leaves the memory of the machine to others"),
    )
