"""All-reduce in one hop: every rank pushes its rows to every rank, and each adds them itself."""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_epilogue import (
    add_residual,
    narrow,
    normalise,
    square_sum,
    sum_sources,
    wait_tags,
)
from .ar_primitives import (
    SCATTER,
    TAGS,
    begin_call,
    clear_sources,
    end_call,
    load_unit,
    put_tag,
    report,
    stall,
    store_unit,
    unmark,
)


@triton.jit(do_not_specialize=["rank", "rows", "first", "blocks", "limit"])
def one_shot_kernel(
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

    A block takes one part of a row (UNITS // PARTS units). With more than one part, the parts
    of a row exchange their sums of squares through tags in this rank's own memory, so all of
    them must run at once: rows * PARTS <= blocks.
    """
    own = peers[WORLD - 1]
    call, half, limit = begin_call(own, limit, FAULT)
    slot = slots + half * half_bytes
    block = tl.program_id(0) + first
    width: tl.constexpr = UNITS // PARTS
    lane = tl.arange(0, TILE)
    keep = lane < width
    for item in range(block, rows * PARTS, blocks):
        offset = (item * width + lane).to(tl.int64) * 16
        words = unmark(load_unit(x.to(tl.int64) + offset, keep, False), FAULT)
        to = slot + rank * rows.to(tl.int64) * (UNITS * 16) + offset
        for step in tl.static_range(WORLD):
            store_unit(peers[step] + to, words, keep, True)
    for item in range(block, rows * PARTS, blocks):
        offset = (item * width + lane).to(tl.int64) * 16
        if FUSED:
            # Loaded before the wait, so that they are there after it.
            old = load_unit(residual.to(tl.int64) + offset, keep, False)
            column = ((item % PARTS) * width + lane).to(tl.int64) * 16
            gain = load_unit(weight.to(tl.int64) + column, keep, False)
        stride = rows.to(tl.int64) * (UNITS * 16)
        sums, late = sum_sources(own + slot + offset, stride, keep, limit, WORLD, BF16)
        if late < WORLD:
            report(own, call, SCATTER, rank, late)
        if STALL > 0:
            stall(own, STALL)
        if FUSED:
            words, values = add_residual(sums, old, BF16)
            store_unit(residual_out.to(tl.int64) + offset, words, keep, False)
            squares = square_sum(values, keep)
            if PARTS > 1:
                tags = own + TAG_OFFSET + half * TAG_BYTES + (item // PARTS) * (PARTS * 8)
                put_tag(tags + (item % PARTS) * 8, call, squares, lane)
                index = tl.arange(0, TAG_TILE)
                squares, missing = wait_tags(tags + index * 8, call, index < PARTS, limit)
                if missing != 0:
                    report(own, call, TAGS, rank, rank)
            words = normalise(values, gain, squares, eps, UNITS * 8, BF16)
        else:
            words = narrow(sums, BF16)
        store_unit(out.to(tl.int64) + offset, words, keep, False)
        clear_sources(own + slot + offset, stride, keep, WORLD, FAULT)
    end_call(own, block, blocks, rows)
