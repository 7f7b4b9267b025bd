"""Joins the splits of MLA verify: a softmax over splits, weighted by their log-sum-exp.

A second launch rather than a last-arriver inside the first: the partials of one request (4.3 MB
at 132 splits x 32 rows) want every SM, and a grid-wide barrier would need all programs resident
beside whatever else the server runs. Launched early (PDL), so that only the wait is serial.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastverify.kernels.triton.mla_schedule import find_splits, request_lengths
from fastverify.kernels.triton.mla_verify import SIZES, device_scale
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=SIZES)
def mla_merge_kernel(
    partial_ptr, lse_ptr, lens_ptr, qo_indptr_ptr, v_scale_ptr, out_ptr, v_scale,
    batch, max_context, programs, min_split,
    BATCH_POW2: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr,
    LENS_ARE_PREFIX: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LINES rows x heads and COLUMNS of their output.

    Grid (LATENT / COLUMNS, ceil(ROWS * HEADS / LINES), batch). Sums in split order, SPLITS at a
    time, so the result depends on the lengths and the plan only. A request with one split was
    written by that split; one without keys gets zeros.
    """
    request = tl.program_id(2)
    first, rows, total = request_lengths(
        request, request < batch, lens_ptr, qo_indptr_ptr, max_context, ROWS, LENS_ARE_PREFIX
    )
    base, count = find_splits(
        request, total, lens_ptr, qo_indptr_ptr, batch, max_context, programs, min_split,
        BATCH_POW2, ROWS, LENS_ARE_PREFIX, BLOCK_N,
    )  # fmt: skip
    # Lengths may be read before the wait: the split programs start their dependents only after
    # their own wait, so whatever wrote the lengths had finished by then. Every program waits,
    # idle ones too: this launch must not end before the one whose outputs it stands for.
    if PDL:
        gdc_wait()
    m = tl.program_id(1) * LINES + tl.arange(0, LINES)
    if (tl.program_id(1) * LINES >= rows * HEADS) | (count == 1):
        return
    line_ok = m < rows * HEADS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    line = base.to(tl.int64) * (ROWS * HEADS) + m
    top = tl.full([LINES], float("-inf"), tl.float32)
    weight = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, COLUMNS], tl.float32)
    for block in range(0, count, SPLITS):
        split = block + tl.arange(0, SPLITS)
        ok = (split < count)[:, None] & line_ok[None, :]
        at = line[None, :] + split[:, None] * (ROWS * HEADS)
        lse = tl.load(lse_ptr + at, mask=ok, other=float("-inf"))
        part = tl.load(
            partial_ptr + (at * LATENT)[:, :, None] + column[None, None, :],
            mask=ok[:, :, None], other=0.0,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, 0))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(lse - origin[None, :])
        shrink = tl.exp2(top - origin)
        weight = weight * shrink + tl.sum(share, 0)
        acc = acc * shrink[:, None] + tl.sum(part.to(tl.float32) * share[:, :, None], 0)
        top = new_top
    acc = acc / tl.where(weight > 0, weight, 1.0)[:, None] * device_scale(v_scale, v_scale_ptr)
    out = out_ptr + ((first * HEADS).to(tl.int64) + m)[:, None] * LATENT + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=line_ok[:, None])
