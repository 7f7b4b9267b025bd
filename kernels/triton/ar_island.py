"""All-reduce for two islands of four ranks: only a quarter of a row crosses between them, once.

Three hops: scatter slices within the island, swap partial sums with the counterpart in the other
island, gather within the island. The partial sums cross as fp32, so the total is rounded once. It
is taken as (r0 + r1 + r2 + r3) + (r4 + r5 + r6 + r7), the same on all ranks; for values whose
sums are not exact it can differ in the last place from the order of the other kernels.

Each rank serves its island in the order next, second next, third next, itself: while ranks keep
pace, a rank has one outbound and one inbound stream at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_epilogue import add, sum_sources
from .ar_primitives import (
    CROSS,
    SCATTER,
    begin_call,
    clear_sources,
    end_call,
    is_missing,
    load_unit,
    report,
    stall,
    store_unit,
    unmark,
)
from .ar_slices import gather_items, publish, scatter_items


@triton.jit
def swap_partial(mine, theirs, sums, keep, limit, FAULT: tl.constexpr):
    """Send eight fp32 sums to the counterpart, and add the eight it sends.

    mine, theirs: addresses in this rank's memory and in the counterpart's of two units per lane,
    16 bytes apart. Returns the totals, and 0 if they arrived before the limit.
    """
    for part in tl.static_range(2):
        words = ()
        for i in tl.static_range(4):
            words = words + (sums[4 * part + i].to(tl.int32, bitcast=True),)
        store_unit(theirs + part * 16, unmark(words, FAULT), keep, True)
    total = sums
    missing = 1
    polls = 0
    while (missing != 0) & (polls < limit):
        low = load_unit(mine, keep, True)
        high = load_unit(mine + 16, keep, True)
        missing = tl.max((is_missing(low) | is_missing(high)).to(tl.int32))
        other = ()
        for i in tl.static_range(4):
            other = other + (low[i].to(tl.float32, bitcast=True),)
        for i in tl.static_range(4):
            other = other + (high[i].to(tl.float32, bitcast=True),)
        total = add(sums, other)
        polls += 1
    return total, missing


@triton.jit(do_not_specialize=["rank", "rows", "first", "blocks", "limit"])
def island_kernel(
    x,
    residual,
    weight,
    out,
    residual_out,
    peers,  # addresses as mapped here: next, second and third next of the island, own, counterpart
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

    Slots of a half: scattered units [source, item, lane], partial sums [item, lane, 2], gathered
    units [owner, item, lane]. All blocks of a rank must run at once, as in `two_shot_kernel`.
    """
    mates: tl.constexpr = WORLD // 2
    own = peers[mates - 1]
    call, half, limit = begin_call(own, limit, FAULT)
    block = tl.program_id(0) + first
    width: tl.constexpr = UNITS // mates // PARTS
    place = rank % mates
    base = rank - place
    items = rows * PARTS
    stride = items.to(tl.int64) * (width * 16)
    scattered = slots + half * half_bytes
    crossed = scattered + mates * stride
    gathered = crossed + 2 * stride
    tags = TAG_OFFSET + half * TAG_BYTES
    mine = scattered + place * stride
    scatter_items(x, peers, place, mine, block, items, blocks, mates, UNITS, PARTS, TILE, FAULT)

    lane = tl.arange(0, TILE)
    keep = lane < width
    for item in range(block, items, blocks):
        row = item // PARTS
        old = (0, 0, 0, 0)
        if FUSED:
            # Loaded before the wait, so that it is there after it.
            column = (place * PARTS + item % PARTS) * width + lane
            offset = (row * UNITS + column).to(tl.int64) * 16
            old = load_unit(residual.to(tl.int64) + offset, keep, False)
        at = (item * width + lane).to(tl.int64) * 16
        sums, late = sum_sources(own + scattered + at, stride, keep, limit, mates, BF16)
        if late < mates:
            report(own, call, SCATTER, rank, base + late)
        swapped = own + crossed + 2 * at
        sums, late = swap_partial(
            swapped, peers[mates] + crossed + 2 * at, sums, keep, limit, FAULT
        )
        if late != 0:
            report(own, call, CROSS, rank, (rank + mates) % WORLD)
        tag = tags + ((row * mates + place) * PARTS + item % PARTS) * 8
        slot = gathered + place * stride + at
        publish(peers, sums, old, slot, tag, call, keep, lane, mates, BF16, FUSED)
        if STALL > 0:
            stall(own, STALL)
        clear_sources(own + scattered + at, stride, keep, mates, FAULT)
        clear_sources(swapped, 16, keep, 2, FAULT)

    gather_items(
        out, residual_out, weight, own, gathered, tags, rank, base, call, limit, eps,
        block, items, blocks, mates, UNITS, PARTS, TILE, TAG_TILE, BF16, FUSED, FAULT,
    )  # fmt: skip
    end_call(own, block, blocks, rows)
