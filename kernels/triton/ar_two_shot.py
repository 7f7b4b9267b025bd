"""All-reduce in two hops: each rank adds one slice of every row and sends the result to all."""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_epilogue import sum_sources
from .ar_primitives import SCATTER, begin_call, clear_sources, end_call, load_unit, report, stall
from .ar_slices import gather_items, publish, scatter_items


@triton.jit(do_not_specialize=["rank", "rows", "first", "blocks", "limit"])
def two_shot_kernel(
    x,
    residual,
    weight,
    out,
    residual_out,
    peers,  # addresses of the ranks' memory as mapped here: rank + 1, rank + 2, ..., rank
    slots,  # offset in that memory of the data slots, and the bytes of one half
    half_bytes,
    rank,
    rows,
    first,
    blocks,
    limit,
    eps,
    WORLD: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TAG_TILE: tl.constexpr,
    TAG_OFFSET: tl.constexpr,
    TAG_BYTES: tl.constexpr,
    BF16: tl.constexpr,
    FUSED: tl.constexpr,
    FAULT: tl.constexpr,
    STALL: tl.constexpr,
):
    """out = sum over ranks of x; FUSED: out = norm, residual_out = the new residual.

    Slots of a half: scattered units [source, item, lane], then gathered ones [owner, item, lane].
    All blocks of a rank must run at once: the norm of a row waits for its parts.
    """
    own = peers[WORLD - 1]
    call, half, limit = begin_call(own, limit, FAULT)
    block = tl.program_id(0) + first
    width: tl.constexpr = UNITS // WORLD // PARTS
    items = rows * PARTS
    stride = items.to(tl.int64) * (width * 16)
    scattered = slots + half * half_bytes
    gathered = scattered + WORLD * stride
    tags = TAG_OFFSET + half * TAG_BYTES
    mine = scattered + rank * stride
    scatter_items(x, peers, rank, mine, block, items, blocks, WORLD, UNITS, PARTS, TILE, FAULT)

    lane = tl.arange(0, TILE)
    keep = lane < width
    for item in range(block, items, blocks):
        row = item // PARTS
        old = (0, 0, 0, 0)
        if FUSED:
            # Loaded before the wait, so that it is there after it.
            column = (rank * PARTS + item % PARTS) * width + lane
            offset = (row * UNITS + column).to(tl.int64) * 16
            old = load_unit(residual.to(tl.int64) + offset, keep, False)
        at = (item * width + lane).to(tl.int64) * 16
        sums, late = sum_sources(own + scattered + at, stride, keep, limit, WORLD, BF16)
        if late < WORLD:
            report(own, call, SCATTER, rank, late)
        tag = tags + ((row * WORLD + rank) * PARTS + item % PARTS) * 8
        slot = gathered + rank * stride + at
        publish(peers, sums, old, slot, tag, call, keep, lane, WORLD, BF16, FUSED)
        if STALL > 0:
            stall(own, STALL)
        clear_sources(own + scattered + at, stride, keep, WORLD, FAULT)

    gather_items(
        out, residual_out, weight, own, gathered, tags, rank, 0, call, limit, eps,
        block, items, blocks, WORLD, UNITS, PARTS, TILE, TAG_TILE, BF16, FUSED, FAULT,
    )  # fmt: skip
    end_call(own, block, blocks, rows)
