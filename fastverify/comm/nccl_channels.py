"""Checks on channel counts and buffer sizes."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.comm.nccl_case import Case
from fastverify.comm.nccl_values import number
from fastverify.machine.finding import Finding

_RENAMED = {
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_CTAS",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS",
}
_MINIMA = ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS")
_MAXIMA = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS")


def check(case: Case) -> Iterator[Finding]:
    """Old names, empty ranges, numbers that are none, and buffers that NCCL would refuse."""
    env = case.env
    for old, new in _RENAMED.items():
        if old in env:
            also = f" and {new}={env[new]} is set too" if new in env else ""
            text = f"{old}={env[old]} is an old name{also}; use {new} alone."
            yield Finding("warn" if also else "info", "renamed", text, "facts 2")
    for name in (*_MINIMA, *_MAXIMA):
        value = number(env[name]) if name in env else 1
        if value is None or value < 1:
            text = f"{name}={env[name]} is not a channel count; use 1 or more."
            yield Finding("warn", "channels-invalid", text, "facts 2")
    low = [(value, n) for n in _MINIMA if (value := number(env.get(n, ""))) is not None]
    high = [(value, n) for n in _MAXIMA if (value := number(env.get(n, ""))) is not None]
    if low and high and max(low)[0] > min(high)[0]:
        (least, lower), (most, upper) = max(low), min(high)
        text = f"{lower}={least} is above {upper}={most}; make the minimum the smaller one."
        yield Finding("warn", "channels-contradiction", text, "facts 2")
    size = env.get("NCCL_BUFFSIZE", "")
    count = number(size)
    if size and (count is None or count < 1 or count & (count - 1) or str(count) != size.strip()):
        text = f"NCCL_BUFFSIZE={size} is not a power of two in bytes; 4194304 is the default."
        yield Finding("warn", "buffsize-invalid", text, "facts 2")
