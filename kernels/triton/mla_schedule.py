"""Device helpers of MLA verify: who reads which tokens, where they lie, who may see them.

Nothing here is planned on the host. Every program derives its share from the lengths that lie
in device memory, so one captured graph serves any mix of contexts up to its maximum. Functions
that Gluon calls too take their index vectors (`requests`: 0 .. BATCH_POW2 - 1), which have layouts
there.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Candidate split lengths tried at once; see `split_tokens`.
CANDIDATES: tl.constexpr = tl.constexpr(32)


@triton.jit
def request_lengths(
    request, ok, lens_ptr, qo_indptr_ptr, max_context,
    ROWS: tl.constexpr, LENS_ARE_PREFIX: tl.constexpr,
):  # fmt: skip
    """First query token, query rows and total key tokens of each request (vector or scalar).

    Rows and tokens are clamped to the plan: a wrong length may give wrong numbers, never an
    access outside the tables.
    """
    seq = tl.load(lens_ptr + request, mask=ok, other=0).to(tl.int32)
    if qo_indptr_ptr is None:
        first = request * ROWS
        rows = tl.where(ok, ROWS, 0)
    else:
        first = tl.load(qo_indptr_ptr + request, mask=ok, other=0).to(tl.int32)
        last = tl.load(qo_indptr_ptr + request + 1, mask=ok, other=0).to(tl.int32)
        rows = tl.minimum(last - first, ROWS)
    total = seq + rows if LENS_ARE_PREFIX else seq
    total = tl.where(rows > 0, tl.maximum(tl.minimum(total, max_context), 0), 0)
    return first, rows, total


@triton.jit
def whole_tiles(tokens, min_split, BLOCK_N: tl.constexpr):
    return tl.cdiv(tl.maximum(tokens, min_split), BLOCK_N) * BLOCK_N


@triton.jit
def split_tokens(totals, steps, programs, min_split, BLOCK_N: tl.constexpr):
    """Shortest split length with which all requests together need at most `programs` splits.

    With base = ceil(sum / programs), a split of 2 * base needs at most programs / 2 + batch
    splits, so programs >= 2 * batch makes one of the candidates base .. 2.9 * base fit.
    steps: 0 .. CANDIDATES - 1.
    """
    base = tl.cdiv(tl.sum(totals, 0), programs)
    tokens = tl.cdiv(base * (16 + steps), 16)
    tokens = whole_tiles(tokens, min_split, BLOCK_N)
    needed = tl.sum(tl.cdiv(totals[None, :], tokens[:, None]), 1)
    return tl.min(tl.where(needed <= programs, tokens, 0x7FFFFFFF), 0)


@triton.jit
def batch_schedule(
    requests, steps, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
    ROWS: tl.constexpr, LENS_ARE_PREFIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Split length, and for each request of the batch how many splits it has."""
    _, _, totals = request_lengths(
        requests, requests < batch, lens_ptr, qo_indptr_ptr, max_context, ROWS, LENS_ARE_PREFIX
    )
    tokens = split_tokens(totals, steps, programs, min_split, BLOCK_N)
    return tokens, tl.cdiv(totals, tokens)


@triton.jit
def locate(program, requests, splits, batch):
    """Request that a program works for (`batch`: none), and the first program of that request."""
    # Padding above `batch` has no splits, so idle programs count past it.
    ends = tl.cumsum(splits, 0)
    request = tl.minimum(tl.sum(tl.where(ends <= program, 1, 0), 0), batch)
    return request, tl.sum(tl.where(requests < request, splits, 0), 0)


@triton.jit
def claim(
    program, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
    BATCH_POW2: tl.constexpr, ROWS: tl.constexpr, LENS_ARE_PREFIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Work of one program: request, first query token, rows, total keys, split length, and the
    first key (at or past the total when there is no work)."""
    request = program * 0
    before = request
    if BATCH_POW2 > 1:
        requests = tl.arange(0, BATCH_POW2)
        tokens, splits = batch_schedule(
            requests, tl.arange(0, CANDIDATES), lens_ptr, qo_indptr_ptr, batch, max_context,
            programs, min_split, ROWS, LENS_ARE_PREFIX, BLOCK_N,
        )  # fmt: skip
        request, before = locate(program, requests, splits, batch)
    first, rows, total = request_lengths(
        request, request < batch, lens_ptr, qo_indptr_ptr, max_context, ROWS, LENS_ARE_PREFIX
    )
    if BATCH_POW2 == 1:
        # Nothing but the key range waits for the length: q and the table row load beside it.
        tokens = whole_tiles(tl.cdiv(total, programs), min_split, BLOCK_N)
    return request, first, rows, total, tokens, (program - before) * tokens


@triton.jit
def find_splits(
    request, total, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
    BATCH_POW2: tl.constexpr, ROWS: tl.constexpr, LENS_ARE_PREFIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First program of a request with `total` keys, and how many splits it has."""
    if BATCH_POW2 == 1:
        before = request * 0
        tokens = whole_tiles(tl.cdiv(total, programs), min_split, BLOCK_N)
    else:
        requests = tl.arange(0, BATCH_POW2)
        tokens, splits = batch_schedule(
            requests, tl.arange(0, CANDIDATES), lens_ptr, qo_indptr_ptr, batch, max_context,
            programs, min_split, ROWS, LENS_ARE_PREFIX, BLOCK_N,
        )  # fmt: skip
        before = tl.sum(tl.where(requests < request, splits, 0), 0)
    return before, tl.cdiv(total, tokens)


@triton.jit
def load_pages(table_row_ptr, position, ok, PAGE_SIZE: tl.constexpr):
    """Pages of key positions, from a page table row (page size 1: the slots)."""
    return tl.load(table_row_ptr + position // PAGE_SIZE, mask=ok, other=0)


@triton.jit
def slots_of(page, position, PAGE_SIZE: tl.constexpr):
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def visible_bits(row, ok, request, prefix, total, mask_ptr, mask_indptr_ptr, ROWS: tl.constexpr):
    """Bit j of a query row's word says whether it sees new token j; the prefix is always seen.

    No mask: causal. mask alone: uint8 [batch, ROWS, ROWS]. With mask_indptr: SGLang's FULL_MASK,
    where request b has [rows, total] entries from mask_indptr[b]; only its last columns are read.
    """
    # A return inside a compile-time branch would not end compilation, hence the else.
    if mask_ptr is None:
        bits = (2 << row) - 1
    else:
        if mask_indptr_ptr is None:
            base = mask_ptr + request.to(tl.int64) * ROWS * ROWS
            stride = ROWS
        else:
            base = mask_ptr + tl.load(mask_indptr_ptr + request).to(tl.int64) + prefix
            stride = total
        bits = row * 0
        for j in tl.static_range(ROWS):
            # A request with fewer rows has fewer columns; a negative prefix has no such key.
            there = ok & (j < total - prefix) & (j + prefix >= 0)
            seen = tl.load(base + row * stride + j, mask=there, other=0)
            bits |= tl.where(seen != 0, 1 << j, 0)
    return bits


@triton.jit
def sees(position, prefix, bits):
    """Whether a row with these bits sees a key position (broadcasts)."""
    new = position - prefix
    shift = tl.minimum(tl.maximum(new, 0), 31)
    return (new < 0) | (((bits >> shift) & 1) != 0)
