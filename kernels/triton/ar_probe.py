"""The store that the proof of peers is made with: the same instruction the all-reduce uses."""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_primitives import load_unit, store_unit


@triton.jit
def probe_kernel(source, address, UNITS: tl.constexpr):
    """Copy UNITS (a power of two) 16-byte units from this GPU to an address of any GPU."""
    lane = tl.arange(0, UNITS)
    offset = lane.to(tl.int64) * 16
    words = load_unit(source.to(tl.int64) + offset, lane >= 0, False)
    store_unit(address + offset, words, lane >= 0, True)
