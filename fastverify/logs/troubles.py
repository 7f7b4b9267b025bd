"""Error lines of servers: which kinds there are, and what each one means."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from fastverify.machine.finding import Severity

Phase = Literal["start", "capture", "replay", "serving"]


class Trouble(msgspec.Struct, frozen=True):
    """The first line of one kind of error on one rank; time in seconds, None when not stamped.

    phase: `replay` is between the last capture and the first decode line.
    """

    kind: str
    rank: int | None
    time: float | None
    phase: Phase
    line: str


class Meaning(msgspec.Struct, frozen=True):
    """How a kind of error is recognised and explained.

    follows: this error is usually the echo of another one, so it is never named as the cause.
    """

    pattern: re.Pattern[str]
    severity: Severity
    text: str
    source: str
    follows: bool = False


def _meaning(
    pattern: str, severity: Severity, text: str, source: str, follows: bool = False
) -> Meaning:
    return Meaning(re.compile(pattern, re.IGNORECASE), severity, text, source, follows)


MEANINGS: dict[str, Meaning] = {
    "kernel-arch": _meaning(
        r"No supported CUDA architectures found|Unsupported architecture",
        "fail",
        "a kernel was chosen that has no code for this GPU; use triton or flashinfer for target,"
        " verify and draft attention and leave all-reduce fusion off",
        "R57, R61",
    ),
    "multicast": _meaning(
        r"multicast\w*.{0,80}(?:not support|unsupported|fail|cannot|null)|"
        r"(?:not support|unsupported|fail|cannot).{0,80}multicast",
        "warn",
        "a fused all-reduce asked for multicast memory, which PCIe GPUs do not have; switch"
        " all-reduce fusion off",
        "R59, R60",
    ),
    "peer-unsupported": _meaning(
        r"peer access is not supported between",
        "fail",
        "a peer kernel was started on GPUs without peer access; start with"
        " --disable-custom-all-reduce",
        "R56",
    ),
    "ipc-export": _meaning(
        r"(?:ipc|custom_all_reduce|pcie_allreduce|graph_buffer).{0,200}invalid argument",
        "fail",
        "memory could not be exported to the peers, which an allocator with expandable segments or"
        " a memory saver causes; unset PYTORCH_CUDA_ALLOC_CONF",
        "R65, R68",
    ),
    "mtp-missing": _meaning(
        r"layers?[ .]\d+.{0,40}weights? (?:are |is )?missing|missing.{0,40}(?:nextn|mtp)",
        "fail",
        "the checkpoint lacks its prediction layer; take a release that has it or speculate with an"
        " EAGLE-3 drafter",
        "R102",
    ),
    "draft-shape": _meaning(
        r"size mismatch.{0,200}(?:d2t|t2d|lm_head)|(?:d2t|t2d).{0,120}(?:missing|not found|shape)|"
        r"Cannot find the config file for (?:awq|gptq)",
        "fail",
        "the drafter does not load as it was exported; check it with `fastverify doctor --model"
        " TARGET --draft DRAFTER`",
        "R98, R100",
    ),
    "nan-logits": _meaning(
        r"probability tensor contains either|NaN.{0,40}logits|logits.{0,40}(?:NaN|inf)\b",
        "fail",
        "the logits hold NaN or infinity; wipe old kernel caches, then try --disable-radix-cache"
        " and another GEMM backend, one at a time",
        "R50, R51",
    ),
    "device-assert": _meaning(
        r"device-side assert|ScatterGatherKernel|index(?:es)? out of bounds|index out of range",
        "fail",
        "a kernel indexed outside its tensor; if one request was constrained by a grammar, serve"
        " those without speculation",
        "R75",
    ),
    "illegal-access": _meaning(
        r"illegal memory access",
        "fail",
        "a graph used memory that is no longer its own; give target and draft graphs separate"
        " pools, or leave custom all-reduce out of piecewise graphs",
        "R21, R22, R69",
    ),
    "out-of-memory": _meaning(
        r"CUDA out of memory|OutOfMemoryError",
        "fail",
        "the GPU memory ran out; lower --mem-fraction-static, or capture fewer batch sizes",
        "R80",
    ),
    "nccl-timeout": _meaning(
        r"Watchdog caught collective operation timeout",
        "fail",
        "a collective never finished; look for the first error of any rank and for a rank that"
        " skipped it",
        "R72, R74",
        True,
    ),
    "stalled": _meaning(
        r"watchdog timeout|watchdog.{0,60}(?:timed out|exceeded)",
        "fail",
        "the scheduler made no progress while its health page may still answer; run `fastverify"
        " doctor --probe` and look at the last collective of each rank",
        "R40",
        True,
    ),
}


def trouble_in(line: str) -> str | None:
    """The kind of error in a line, None for an ordinary line."""
    lowered = line.lower()
    if not any(hint in lowered for hint in _HINTS):
        return None
    return next((kind for kind, m in MEANINGS.items() if m.pattern.search(line)), None)


# Words of which at least one is in every pattern: most lines of a long log hold none of them.
_HINTS = (
    "support",
    "multicast",
    "invalid argument",
    "missing",
    "mismatch",
    "d2t",
    "t2d",
    "cannot find",
    "tensor contains",
    "logits",
    "assert",
    "scattergather",
    "index",
    "illegal",
    "memory",
    "watchdog",
)
