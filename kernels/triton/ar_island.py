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

from .ar_epilogue import (
    add,
    add_residual,
    gather,
    narrow,
    normalise,
    square_sum,
    sum_sources,
    widen,
)
from .ar_primitives import (
    CROSS,
    GATHER,
    SCATTER,
    begin_call,
    clear_sources,
    end_call,
    is_missing,
    load_unit,
    pick,
    put_tag,
    report,
    stall,
    store_unit,
    unmark,
)


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
    share: tl.constexpr = UNITS // mates
    width: tl.constexpr = share // PARTS
    place = rank % mates
    base = rank - place
    items = rows * PARTS
    stride = items.to(tl.int64) * (width * 16)
    scattered = slots + half * half_bytes
    crossed = scattered + mates * stride
    gathered = crossed + 2 * stride
    tags = TAG_OFFSET + half * TAG_BYTES
    lane = tl.arange(0, TILE)
    keep = lane < width
    step = tl.arange(0, mates)[:, None]
    lanes = tl.arange(0, TILE)[None, :]
    keeps = (step >= 0) & (lanes < width)

    for item in range(block, items, blocks):
        owner = (place + 1 + step) % mates
        column = owner * share + (item % PARTS) * width + lanes
        offset = ((item // PARTS) * UNITS + column).to(tl.int64) * 16
        words = unmark(load_unit(x.to(tl.int64) + offset, keeps, False), FAULT)
        to = scattered + place * stride + (item * width + lanes).to(tl.int64) * 16
        store_unit(pick(peers, step, mates) + to, words, keeps, True)

    for item in range(block, items, blocks):
        row = item // PARTS
        column = place * share + (item % PARTS) * width + lane
        if FUSED:
            # Loaded before the wait, so that it is there after it.
            offset = (row * UNITS + column).to(tl.int64) * 16
            old = load_unit(residual.to(tl.int64) + offset, keep, False)
        at = (item * width + lane).to(tl.int64) * 16
        sums, late = sum_sources(own + scattered + at, stride, keep, limit, mates, BF16)
        if late < mates:
            report(own, call, SCATTER, rank, base + late)
        mine = own + crossed + 2 * at
        sums, late = swap_partial(mine, peers[mates] + crossed + 2 * at, sums, keep, limit, FAULT)
        if late != 0:
            report(own, call, CROSS, rank, (rank + mates) % WORLD)
        if FUSED:
            words, values = add_residual(sums, old, BF16)
            squares = square_sum(values, keep)
            tag = tags + ((row * mates + place) * PARTS + item % PARTS) * 8
        else:
            words = narrow(sums, BF16)
        for peer in tl.static_range(mates):
            store_unit(peers[peer] + gathered + place * stride + at, words, keep, True)
            if FUSED:
                put_tag(peers[peer] + tag, call, squares, lane)
        if STALL > 0:
            stall(own, STALL)
        clear_sources(own + scattered + at, stride, keep, mates, FAULT)
        clear_sources(mine, 16, keep, 2, FAULT)

    for item in range(block, items, blocks):
        row = item // PARTS
        column = step * share + (item % PARTS) * width + lanes
        offset = (row * UNITS + column).to(tl.int64) * 16
        if FUSED:
            gain = load_unit(weight.to(tl.int64) + column.to(tl.int64) * 16, keeps, False)
        index = tl.arange(0, TAG_TILE)
        tag_keep = index < (mates * PARTS if FUSED else 0)
        units = own + gathered + step * stride + (item * width + lanes).to(tl.int64) * 16
        row_tags = own + tags + row * (mates * PARTS * 8) + index * 8
        words, squares, late = gather(
            units, step, keeps, row_tags, index // PARTS, tag_keep, call, limit, mates
        )
        if late < mates:
            report(own, call, GATHER, rank, base + late)
        if FUSED:
            store_unit(residual_out.to(tl.int64) + offset, words, keeps, False)
            words = normalise(widen(words, BF16), gain, squares, eps, UNITS * 8, BF16)
        store_unit(out.to(tl.int64) + offset, words, keeps, False)
        clear_sources(units, 0, keeps, 1, FAULT)
    end_call(own, block, blocks, rows)
