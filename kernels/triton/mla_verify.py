"""Split-KV attention of a few query rows per request against a shared MLA latent.

All rows and heads of a request form one tile (or a few) that shares every key tile; keys are
split over programs so that the GPU is full at any batch x context, and `mla_merge` joins the
splits. Traffic at batch 1: keys `tokens * 1152` bytes once, partials `splits * rows * heads *
1 KiB` written and read through L2. At 16k, 8 heads, 4 rows on 132 SMs that is 18.9 MB of keys
against 2 * 4.3 MB of L2 traffic spread over all SMs: splitting further costs more than it gains,
and merging in the last program to arrive (one SM reads about 0.1 TB/s) would take 40 us.

Partial outputs are bf16, whose range is that of the keys. Rounding them costs at most what rounding
the output to bf16 costs for the largest of them, since the merge takes a weighted mean.

Two bodies here and one in `mla_wgmma`, chosen by the table:

- `mla_wide_kernel`: one [BLOCK_M, LATENT] accumulator; at BLOCK_M 64 Triton uses wgmma on SM90.
- `mla_chunked_kernel`: the latent is cut into one chunk per warp. Each warp keeps its chunk of
  the accumulator in registers and reads only its own chunk of q and of the key tile, for both
  products; scores are summed over the warps. With mma.sync (SM120, and small BLOCK_M on SM90)
  this spares every warp from reading the whole of q again for each key tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastverify.kernels.triton.mla_schedule import (
    claim,
    load_pages,
    sees,
    slots_of,
    visible_bits,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Sizes of a plan: arithmetic only, so one compiled kernel serves every batch and context.
SIZES = ["batch", "max_context", "programs", "min_split"]
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def device_scale(factor, scale_ptr):
    """A factor known on the host, times one in device memory where there is one."""
    if scale_ptr is not None:
        factor *= tl.load(scale_ptr).to(tl.float32)
    return factor


@triton.jit(do_not_specialize=SIZES)
def mla_wide_kernel(
    q_ptr, q_rope_ptr, kv_ptr, table_ptr, table_row_ptr, lens_ptr, qo_indptr_ptr,
    mask_ptr, mask_indptr_ptr, k_scale_ptr, v_scale_ptr, out_ptr, partial_ptr, lse_ptr,
    sm_scale, v_scale, q_stride, q_head_stride, rope_stride, rope_head_stride, table_stride,
    batch, max_context, programs, min_split,
    BATCH_POW2: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, KV_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LENS_ARE_PREFIX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one request, one tile of its rows x heads. Grid (row tiles, programs)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(1)
    request, first, rows, total, tokens, start = claim(
        program, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
        BATCH_POW2, ROWS, LENS_ARE_PREFIX, BLOCK_N,
    )  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // HEADS
    row_ok = row < rows
    d = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    n = tl.arange(0, BLOCK_N)
    stop = tl.minimum(start + tokens, total)
    prefix = total - rows
    token = (first + row).to(tl.int64)
    head = m % HEADS
    table_row = request
    if table_row_ptr is not None:
        table_row = tl.load(table_row_ptr + request, mask=request < batch, other=0)
    table = table_ptr + table_row.to(tl.int64) * table_stride
    q = tl.load(
        q_ptr + (token * q_stride + head * q_head_stride)[:, None] + d[None, :],
        mask=row_ok[:, None], other=0.0,
    )  # fmt: skip
    q_rope = tl.load(
        q_rope_ptr + (token * rope_stride + head * rope_head_stride)[:, None] + r[None, :],
        mask=row_ok[:, None], other=0.0,
    )  # fmt: skip
    if (start >= stop) | (tl.program_id(0) * BLOCK_M >= rows * HEADS):
        return
    bits = visible_bits(row, row_ok, request, prefix, total, mask_ptr, mask_indptr_ptr, ROWS)
    scale = device_scale(sm_scale, k_scale_ptr) * LOG2E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT], tl.float32)
    # Page ids are loaded two tiles ahead: one would put that load right before the copies that
    # wait for it. The select is there for Triton, which pipelines no value it merely hands on.
    ahead = start + BLOCK_N + n
    pages = load_pages(table, start + n, start + n < stop, PAGE_SIZE)
    next_pages = load_pages(table, ahead, ahead < stop, PAGE_SIZE)
    for tile in range(start, stop, BLOCK_N):
        position = tile + n
        ok = position < stop
        key = kv_ptr + slots_of(pages, position, PAGE_SIZE) * KV_STRIDE
        # Unread keys are zero, not garbage: 0 * NaN would reach the output through p.
        k = tl.load(key[:, None] + d[None, :], mask=ok[:, None], other=0.0).to(q.dtype)
        k_rope = tl.load(key[:, None] + LATENT + r[None, :], mask=ok[:, None], other=0.0)
        ahead = position + 2 * BLOCK_N
        pages = tl.where(position + BLOCK_N < stop, next_pages, 0)
        next_pages = load_pages(table, ahead, ahead < stop, PAGE_SIZE)
        score = tl.dot(q, tl.trans(k))
        score = tl.dot(q_rope, tl.trans(k_rope.to(q.dtype)), score) * scale
        seen = ok[None, :] & sees(position[None, :], prefix, bits[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - origin[:, None])
        shrink = tl.exp2(top - origin)
        weight = weight * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), k, acc * shrink[:, None])
        top = new_top

    acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    if total <= tokens:
        acc *= device_scale(v_scale, v_scale_ptr)
        out = out_ptr + (token * HEADS + head)[:, None] * LATENT + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None])
    else:
        slot = program.to(tl.int64) * (ROWS * HEADS) + m
        partial = partial_ptr + slot[:, None] * LATENT + d[None, :]
        tl.store(partial, acc.to(partial_ptr.dtype.element_ty), mask=row_ok[:, None])
        tl.store(lse_ptr + slot, top + tl.log2(weight), mask=row_ok)


@triton.jit(do_not_specialize=SIZES)
def mla_chunked_kernel(
    q_ptr, q_rope_ptr, kv_ptr, table_ptr, table_row_ptr, lens_ptr, qo_indptr_ptr,
    mask_ptr, mask_indptr_ptr, k_scale_ptr, v_scale_ptr, out_ptr, partial_ptr, lse_ptr,
    sm_scale, v_scale, q_stride, q_head_stride, rope_stride, rope_head_stride, table_stride,
    batch, max_context, programs, min_split,
    BATCH_POW2: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, KV_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LENS_ARE_PREFIX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `mla_wide_kernel`, with tensors [CHUNKS, rows or keys, LATENT / CHUNKS]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(1)
    request, first, rows, total, tokens, start = claim(
        program, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
        BATCH_POW2, ROWS, LENS_ARE_PREFIX, BLOCK_N,
    )  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // HEADS
    row_ok = row < rows
    WIDTH: tl.constexpr = LATENT // CHUNKS
    # mma needs a depth of 16, so at 8 chunks half of them carry no rope at all.
    ROPE_WIDTH: tl.constexpr = 16 if ROPE // CHUNKS < 16 else ROPE // CHUNKS
    c = tl.arange(0, CHUNKS)[:, None, None]
    d = c * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    r = c * ROPE_WIDTH + tl.arange(0, ROPE_WIDTH)[None, None, :]
    n = tl.arange(0, BLOCK_N)
    stop = tl.minimum(start + tokens, total)
    prefix = total - rows
    token = (first + row).to(tl.int64)
    head = m % HEADS
    table_row = request
    if table_row_ptr is not None:
        table_row = tl.load(table_row_ptr + request, mask=request < batch, other=0)
    table = table_ptr + table_row.to(tl.int64) * table_stride
    q = tl.load(
        q_ptr + (token * q_stride + head * q_head_stride)[None, :, None] + d,
        mask=row_ok[None, :, None], other=0.0,
    )  # fmt: skip
    q_rope = tl.load(
        q_rope_ptr + (token * rope_stride + head * rope_head_stride)[None, :, None] + r,
        mask=row_ok[None, :, None] & (r < ROPE), other=0.0,
    )  # fmt: skip
    if (start >= stop) | (tl.program_id(0) * BLOCK_M >= rows * HEADS):
        return
    bits = visible_bits(row, row_ok, request, prefix, total, mask_ptr, mask_indptr_ptr, ROWS)
    scale = device_scale(sm_scale, k_scale_ptr) * LOG2E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([CHUNKS, BLOCK_M, WIDTH], tl.float32)
    ahead = start + BLOCK_N + n
    pages = load_pages(table, start + n, start + n < stop, PAGE_SIZE)
    next_pages = load_pages(table, ahead, ahead < stop, PAGE_SIZE)
    for tile in range(start, stop, BLOCK_N):
        position = tile + n
        ok = position < stop
        key = (kv_ptr + slots_of(pages, position, PAGE_SIZE) * KV_STRIDE)[None, :, None]
        k = tl.load(key + d, mask=ok[None, :, None], other=0.0).to(q.dtype)
        k_rope = tl.load(key + LATENT + r, mask=ok[None, :, None] & (r < ROPE), other=0.0)
        ahead = position + 2 * BLOCK_N
        pages = tl.where(position + BLOCK_N < stop, next_pages, 0)
        next_pages = load_pages(table, ahead, ahead < stop, PAGE_SIZE)
        # Scores are [keys, rows]: k is then untransposed in both products, which is what lets
        # Triton copy it asynchronously into one buffer.
        score = tl.dot(k, tl.permute(q, (0, 2, 1)))
        score = tl.dot(k_rope.to(q.dtype), tl.permute(q_rope, (0, 2, 1)), score)
        score = tl.sum(score, 0) * scale
        seen = ok[:, None] & sees(position[:, None], prefix, bits[None, :])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - origin[None, :])
        shrink = tl.exp2(top - origin)
        weight = weight * shrink + tl.sum(p, 0)
        p = tl.broadcast_to(tl.trans(p.to(q.dtype))[None], (CHUNKS, BLOCK_M, BLOCK_N))
        acc = tl.dot(p, k, acc * shrink[None, :, None])
        top = new_top

    acc = acc / tl.where(weight > 0, weight, 1.0)[None, :, None]
    if total <= tokens:
        acc *= device_scale(v_scale, v_scale_ptr)
        out = out_ptr + (token * HEADS + head)[None, :, None] * LATENT + d
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[None, :, None])
    else:
        slot = program.to(tl.int64) * (ROWS * HEADS) + m
        partial = partial_ptr + slot[None, :, None] * LATENT + d
        tl.store(partial, acc.to(partial_ptr.dtype.element_ty), mask=row_ok[None, :, None])
        tl.store(lse_ptr + slot, top + tl.log2(weight), mask=row_ok)
