"""All-reduce in two hops: each rank adds one slice of every row and sends the result to all.

A row is cut into WORLD slices of columns, one per owner, and each slice into PARTS. Item (row,
part) is that part of every slice. A block scatters an item to the owners, adds what this rank
owns of it, and gathers it from all owners, so it waits only for the same item on other ranks. The
sum of squares of a part travels beside it as a tag, because the norm needs those of a whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_epilogue import add_residual, gather, narrow, normalise, square_sum, sum_sources, widen
from .ar_primitives import (
    GATHER,
    SCATTER,
    begin_call,
    clear_sources,
    end_call,
    load_unit,
    pick,
    put_tag,
    report,
    stall,
    store_unit,
    unmark,
)


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
    share: tl.constexpr = UNITS // WORLD
    width: tl.constexpr = share // PARTS
    scattered = slots + half * half_bytes
    items = rows * PARTS
    stride = items.to(tl.int64) * (width * 16)
    gathered = scattered + WORLD * stride
    tags = TAG_OFFSET + half * TAG_BYTES
    lane = tl.arange(0, TILE)
    keep = lane < width
    step = tl.arange(0, WORLD)[:, None]
    lanes = tl.arange(0, TILE)[None, :]
    keeps = (step >= 0) & (lanes < width)

    for item in range(block, items, blocks):
        # The first warps serve the next rank, so that not all ranks write to one at once.
        owner = (rank + 1 + step) % WORLD
        column = owner * share + (item % PARTS) * width + lanes
        offset = ((item // PARTS) * UNITS + column).to(tl.int64) * 16
        words = unmark(load_unit(x.to(tl.int64) + offset, keeps, False), FAULT)
        to = scattered + rank * stride + (item * width + lanes).to(tl.int64) * 16
        store_unit(pick(peers, step, WORLD) + to, words, keeps, True)

    for item in range(block, items, blocks):
        row = item // PARTS
        column = rank * share + (item % PARTS) * width + lane
        if FUSED:
            # Loaded before the wait, so that it is there after it.
            offset = (row * UNITS + column).to(tl.int64) * 16
            old = load_unit(residual.to(tl.int64) + offset, keep, False)
        at = (item * width + lane).to(tl.int64) * 16
        sums, late = sum_sources(own + scattered + at, stride, keep, limit, WORLD, BF16)
        if late < WORLD:
            report(own, call, SCATTER, rank, late)
        if FUSED:
            words, values = add_residual(sums, old, BF16)
            squares = square_sum(values, keep)
            tag = tags + ((row * WORLD + rank) * PARTS + item % PARTS) * 8
        else:
            words = narrow(sums, BF16)
        for peer in tl.static_range(WORLD):
            store_unit(peers[peer] + gathered + rank * stride + at, words, keep, True)
            if FUSED:
                put_tag(peers[peer] + tag, call, squares, lane)
        if STALL > 0:
            stall(own, STALL)
        clear_sources(own + scattered + at, stride, keep, WORLD, FAULT)

    for item in range(block, items, blocks):
        row = item // PARTS
        column = step * share + (item % PARTS) * width + lanes
        offset = (row * UNITS + column).to(tl.int64) * 16
        if FUSED:
            gain = load_unit(weight.to(tl.int64) + column.to(tl.int64) * 16, keeps, False)
        index = tl.arange(0, TAG_TILE)
        tag_keep = index < (WORLD * PARTS if FUSED else 0)
        units = own + gathered + step * stride + (item * width + lanes).to(tl.int64) * 16
        row_tags = own + tags + row * (WORLD * PARTS * 8) + index * 8
        words, squares, late = gather(
            units, step, keeps, row_tags, index // PARTS, tag_keep, call, limit, WORLD
        )
        if late < WORLD:
            report(own, call, GATHER, rank, late)
        if FUSED:
            store_unit(residual_out.to(tl.int64) + offset, words, keeps, False)
            words = normalise(widen(words, BF16), gain, squares, eps, UNITS * 8, BF16)
        store_unit(out.to(tl.int64) + offset, words, keeps, False)
        clear_sources(units, 0, keeps, 1, FAULT)
    end_call(own, block, blocks, rows)
