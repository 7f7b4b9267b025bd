"""MLA verify on Hopper's warpgroup matrix unit, for more lines (rows x heads) than mma.sync feeds.

Written in Gluon because Triton issues the copies of a tile only after the products of the one
before, so that reading and computing take turns. Here copies run STAGES - 1 tiles ahead and are
issued while the scores of the current tile are under way.
"""

from __future__ import annotations

from fastverify.kernels.triton.mla_schedule import (
    CANDIDATES,
    batch_schedule,
    load_pages,
    locate,
    request_lengths,
    sees,
    slots_of,
    visible_bits,
    whole_tiles,
)
from fastverify.kernels.triton.mla_verify import LOG2E, SIZES, device_scale
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def claim_gluon(
    program, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
    BATCH_POW2: gl.constexpr, ROWS: gl.constexpr, LENS_ARE_PREFIX: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """`claim`, with layouts for its vectors."""
    request = program * 0
    before = request
    if BATCH_POW2 > 1:
        mixes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        tokens, splits = batch_schedule(
            gl.arange(0, BATCH_POW2, gl.SliceLayout(0, mixes)),
            gl.arange(0, CANDIDATES, gl.SliceLayout(1, mixes)), lens_ptr, qo_indptr_ptr, batch,
            max_context, programs, min_split, ROWS, LENS_ARE_PREFIX, BLOCK_N,
        )  # fmt: skip
        requests = gl.arange(0, BATCH_POW2, flat)
        request, before = locate(program, requests, gl.convert_layout(splits, flat), batch)
    first, rows, total = request_lengths(
        request, request < batch, lens_ptr, qo_indptr_ptr, max_context, ROWS, LENS_ARE_PREFIX
    )
    if BATCH_POW2 == 1:
        tokens = whole_tiles(gl.cdiv(total, programs), min_split, BLOCK_N)
    return request, first, rows, total, tokens, (program - before) * tokens


@gluon.jit
def copy_query(line, rope_line, ok, q, q_rope, c, LATENT: gl.constexpr):
    """Start copying the rows x heads of a tile, as part of the next commit; others become zero."""
    for part in gl.static_range(LATENT // 64):
        target = q.slice(part * 64, 64, dim=1)
        async_copy.async_load(target, line[:, None] + (part * 64 + c)[None, :], mask=ok)
    async_copy.async_load(q_rope, rope_line[:, None] + c[None, :], mask=ok)


@gluon.jit
def copy_keys(kv_ptr, page, position, stop, latent, rope, buffer, c,
              KV_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, LATENT: gl.constexpr):  # fmt: skip
    """Start copying a tile of keys. Keys at or past `stop` become zero: 0 * NaN reaches outputs."""
    key = kv_ptr + slots_of(page, position, PAGE_SIZE) * KV_STRIDE
    ok = (position < stop)[:, None]
    for part in gl.static_range(LATENT // 64):
        target = latent.index(buffer).slice(part * 64, 64, dim=1)
        async_copy.async_load(target, key[:, None] + (part * 64 + c)[None, :], mask=ok)
    async_copy.async_load(rope.index(buffer), key[:, None] + (LATENT + c)[None, :], mask=ok)
    async_copy.commit_group()


@gluon.jit
def weigh(score, top):
    """Weights of scores against the new maximum, the factor for older sums, and that maximum."""
    new_top = gl.maximum(top, gl.max(score, 1))
    origin = gl.where(new_top == float("-inf"), 0.0, new_top)
    return gl.exp2(score - origin[:, None]), gl.exp2(top - origin), new_top


@gluon.jit
def add_values(p, k, acc, exchange, outputs: gl.constexpr, CHUNKS: gl.constexpr):
    """acc + p @ k. With CHUNKS 2 the warpgroups give each other their half of p first."""
    if CHUNKS == 1:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, outputs, 2))
        acc = warpgroup_mma(p, k, acc, is_async=True)
    else:
        exchange.store(p)
        fence_async_shared()
        gl.barrier()
        acc = warpgroup_mma(exchange, k, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def normalise(acc, weights, top, outputs: gl.constexpr):
    """The mean of the values, and the log-sum-exp (base 2) of the scores."""
    weight = gl.sum(weights, 1)
    share = gl.where(weight > 0, weight, 1.0)
    acc = acc / gl.convert_layout(share, gl.SliceLayout(1, outputs))[:, None]
    return acc, top + gl.log2(weight)


@gluon.jit
def store_lines(base_ptr, slot, acc, m0, end):
    """Store a tile's lines m0 .. end - 1 as bf16 [lines, LATENT] from line `slot` on."""
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0])
    line = m0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, stored))
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, stored))
    at = base_ptr + (slot + line)[:, None] * acc.shape[1] + d[None, :]
    gl.store(at, gl.convert_layout(acc.to(gl.bfloat16), stored), mask=(line < end)[:, None])


@gluon.jit(do_not_specialize=SIZES)
def mla_wgmma_kernel(
    q_ptr, q_rope_ptr, kv_ptr, table_ptr, table_row_ptr, lens_ptr, qo_indptr_ptr,
    mask_ptr, mask_indptr_ptr, k_scale_ptr, v_scale_ptr, out_ptr, partial_ptr, lse_ptr,
    sm_scale, v_scale, q_stride, q_head_stride, rope_stride, rope_head_stride, table_stride,
    batch, max_context, programs, min_split,
    BATCH_POW2: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr,
    ROPE: gl.constexpr, KV_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    LENS_ARE_PREFIX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mla_wide_kernel`, with 8 warps: each warpgroup holds half of the output columns.

    CHUNKS 1: both warpgroups compute all scores. CHUNKS 2: each computes those of half the keys,
    and they exchange weights through shared memory.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [8 // CHUNKS, CHUNKS], [16, BLOCK_N // CHUNKS, 16]
    )
    outputs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    # 8 threads read 128 bytes of a key, so a thread needs the address of one key in 32 only.
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weights_shared: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_N, 16, 2)
    program = gl.program_id(1)
    request, first, rows, total, tokens, start = claim_gluon(
        program, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
        BATCH_POW2, ROWS, LENS_ARE_PREFIX, BLOCK_N,
    )  # fmt: skip
    stop = gl.minimum(start + tokens, total)
    prefix = total - rows
    m0 = gl.program_id(0) * BLOCK_M
    table_row = request
    if table_row_ptr is not None:
        table_row = gl.load(table_row_ptr + request, mask=request < batch, other=0)
    if (start >= stop) | (m0 >= rows * HEADS):
        return
    table = table_ptr + table_row.to(gl.int64) * table_stride
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copies))
    c = gl.arange(0, 64, gl.SliceLayout(0, copies))
    pages = ()
    for tile in gl.static_range(STAGES):
        position = start + tile * BLOCK_N + n
        pages = pages + (load_pages(table, position, position < stop, PAGE_SIZE),)

    q = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, LATENT], shared)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, ROPE], shared)
    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, copies))
    token = (first + m // HEADS).to(gl.int64)
    copy_query(
        q_ptr + token * q_stride + m % HEADS * q_head_stride,
        q_rope_ptr + token * rope_stride + m % HEADS * rope_head_stride,
        (m // HEADS < rows)[:, None], q, q_rope, c, LATENT,
    )  # fmt: skip
    latent = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, LATENT], shared)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE], shared)
    exchange = q
    if CHUNKS == 2:
        exchange = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], weights_shared)
    for tile in gl.static_range(STAGES - 1):
        copy_keys(
            kv_ptr, pages[tile], start + tile * BLOCK_N + n, stop, latent, rope, tile, c,
            KV_STRIDE, PAGE_SIZE, LATENT,
        )  # fmt: skip
    page = pages[STAGES - 1]

    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
    row = m // HEADS
    bits = visible_bits(row, row < rows, request, prefix, total, mask_ptr, mask_indptr_ptr, ROWS)
    scale = device_scale(sm_scale, k_scale_ptr) * LOG2E
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    # Weights are summed over keys only at the end: that sum crosses both warpgroups.
    weights = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    acc = gl.zeros([BLOCK_M, LATENT], gl.float32, outputs)
    buffer = 0
    free = STAGES - 1
    for tile in range(start, stop, BLOCK_N):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        # After this every copy of the tile is visible, and every warp is done with the tile
        # before, whose buffer then takes the next copy.
        gl.barrier()
        k = latent.index(buffer)
        score = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma(q_rope, rope.index(buffer).permute((1, 0)), score, is_async=True)
        ahead = tile + (STAGES - 1) * BLOCK_N + n
        copy_keys(kv_ptr, page, ahead, stop, latent, rope, free, c, KV_STRIDE, PAGE_SIZE, LATENT)
        ahead += BLOCK_N
        page = load_pages(table, ahead, ahead < stop, PAGE_SIZE)
        score = warpgroup_mma_wait(0, deps=[score]) * scale
        key = tile + keys
        seen = (key < stop)[None, :] & sees(key[None, :], prefix, bits[:, None])
        p, shrink, top = weigh(gl.where(seen, score, float("-inf")), top)
        weights = weights * shrink[:, None] + p
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, outputs))[:, None]
        acc = add_values(p.to(gl.bfloat16), k, acc, exchange, outputs, CHUNKS)
        free = buffer
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)
    async_copy.wait_group(0)

    acc, lse = normalise(acc, weights, top, outputs)
    if total <= tokens:
        acc *= device_scale(v_scale, v_scale_ptr)
        store_lines(out_ptr, (first * HEADS).to(gl.int64), acc, m0, rows * HEADS)
    else:
        slot = program.to(gl.int64) * (ROWS * HEADS)
        store_lines(partial_ptr, slot, acc, m0, rows * HEADS)
        gl.store(lse_ptr + slot + m, lse, mask=row < rows)
