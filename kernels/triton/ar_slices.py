"""Scatter and gather of column slices, shared by the two-shot and the island kernel.

A row is cut into OWNERS slices, and each slice into PARTS. Item (row, part) is that part of every
slice. A block scatters an item to the owners, adds what its own rank owns of it, and gathers the
item from all owners, so it waits only for the same item on other ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_epilogue import add_residual, gather, narrow, normalise, square_sum, widen
from .ar_primitives import (
    GATHER,
    clear_sources,
    load_unit,
    pick,
    put_tag,
    report,
    store_unit,
    unmark,
)


@triton.jit
def scatter_items(
    x, peers, place, slot, block, items, blocks,
    OWNERS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    FAULT: tl.constexpr,
):  # fmt: skip
    """Send this rank's slices of every item to their owners, at `slot` of their memory.

    The first warps serve the next rank, so that not all ranks write to one at once.
    """
    share: tl.constexpr = UNITS // OWNERS
    width: tl.constexpr = share // PARTS
    step = tl.arange(0, OWNERS)[:, None]
    lane = tl.arange(0, TILE)[None, :]
    keep = (step >= 0) & (lane < width)
    owner = (place + 1 + step) % OWNERS
    for item in range(block, items, blocks):
        column = owner * share + (item % PARTS) * width + lane
        offset = ((item // PARTS) * UNITS + column).to(tl.int64) * 16
        words = unmark(load_unit(x.to(tl.int64) + offset, keep, False), FAULT)
        to = slot + (item * width + lane).to(tl.int64) * 16
        store_unit(pick(peers, step, OWNERS) + to, words, keep, True)


@triton.jit
def publish(
    peers, sums, old, slot, tag, call, keep, lane,
    OWNERS: tl.constexpr, BF16: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Finish the owned part and send it to `slot` of every owner's memory.

    The norm needs the sum of squares of a whole row: that of the part travels beside it, at `tag`.
    """
    if FUSED:
        words, values = add_residual(sums, old, BF16)
        squares = square_sum(values, keep)
    else:
        words = narrow(sums, BF16)
    for peer in tl.static_range(OWNERS):
        store_unit(peers[peer] + slot, words, keep, True)
        if FUSED:
            put_tag(peers[peer] + tag, call, squares, lane)


@triton.jit
def gather_items(
    out, residual_out, weight, own, slot, tags, rank, base, call, limit, eps, block, items, blocks,
    OWNERS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    TAG_TILE: tl.constexpr, BF16: tl.constexpr, FUSED: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Wait for every item from all owners, and write the outputs of this rank.

    base: rank of owner 0. slot, tags: offsets in this rank's memory of the units
    [owner, item, lane] and of the tags [row, owner, part].
    """
    share: tl.constexpr = UNITS // OWNERS
    width: tl.constexpr = share // PARTS
    owner = tl.arange(0, OWNERS)[:, None]
    lane = tl.arange(0, TILE)[None, :]
    keep = (owner >= 0) & (lane < width)
    index = tl.arange(0, TAG_TILE)
    tag_keep = index < (OWNERS * PARTS if FUSED else 0)
    stride = items.to(tl.int64) * (width * 16)
    for item in range(block, items, blocks):
        row = item // PARTS
        column = owner * share + (item % PARTS) * width + lane
        if FUSED:
            # Loaded before the wait, so that it is there after it.
            gain = load_unit(weight.to(tl.int64) + column.to(tl.int64) * 16, keep, False)
        units = own + slot + owner * stride + (item * width + lane).to(tl.int64) * 16
        row_tags = own + tags + row * (OWNERS * PARTS * 8) + index * 8
        words, squares, late = gather(
            units, owner, keep, row_tags, index // PARTS, tag_keep, call, limit, OWNERS
        )
        if late < OWNERS:
            report(own, call, GATHER, rank, base + late)
        offset = (row * UNITS + column).to(tl.int64) * 16
        if FUSED:
            store_unit(residual_out.to(tl.int64) + offset, words, keep, False)
            words = normalise(widen(words, BF16), gain, squares, eps, UNITS * 8, BF16)
        store_unit(out.to(tl.int64) + offset, words, keep, False)
        clear_sources(units, 0, keep, 1, FAULT)
