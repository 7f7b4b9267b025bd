"""What follows an arrival, the same in every all-reduce kernel: ordered sum, residual, RMSNorm.

Arithmetic, for values of one row:

    total    = bf16(x0 + x1 + ... )                 fp32, in rank order, rounded once
    residual = bf16(float(total) + float(residual))
    norm     = bf16(float(residual) * rsqrt(mean(float(residual) ** 2) + eps) * float(weight))

The residual equals, bit for bit, a plain all-reduce followed by SGLang's fused add and norm. The
norm reads the rounded residual, which is what travels; SGLang's reads the sum before rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ar_primitives import INTERPRETED, is_missing, is_stale, load_tag, load_unit, tag_value


@triton.jit
def widen(words, BF16: tl.constexpr):
    """Eight fp32 values of a unit: the lower halves of its words, then the upper halves."""
    low = ()
    high = ()
    for i in tl.static_range(4):
        if BF16:
            low = low + ((words[i] << 16).to(tl.float32, bitcast=True),)
            high = high + ((words[i] & -65536).to(tl.float32, bitcast=True),)
        else:
            half = words[i].to(tl.int16).to(tl.float16, bitcast=True)
            low = low + (half.to(tl.float32),)
            half = (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            high = high + (half.to(tl.float32),)
    return low + high


@triton.jit
def _round(value, BF16: tl.constexpr):
    if BF16 and INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(value != value, 0x7FFF, bits)
    elif BF16:
        half = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        half = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return half & 0xFFFF


@triton.jit
def narrow(values, BF16: tl.constexpr):
    """The four words of eight fp32 values, each rounded to nearest even."""
    words = ()
    for i in tl.static_range(4):
        words = words + (_round(values[i], BF16) | (_round(values[i + 4], BF16) << 16),)
    return words


@triton.jit
def add(left, right):
    """Element by element, for tuples of one length."""
    out = ()
    for i in tl.static_range(len(left)):
        out = out + (left[i] + right[i],)
    return out


@triton.jit
def sum_sources(address, stride, keep, limit, SOURCES: tl.constexpr, BF16: tl.constexpr):
    """Wait for one unit from each source, SOURCES of them `stride` bytes apart, and add them.

    Returns eight fp32 sums, taken in source order, and the first source still missing when
    `limit` polls have passed (SOURCES when none is). One poll loads every source, so the wait
    for the last one also is the load of all.
    """
    zero = tl.zeros_like(address).to(tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    late = 0
    polls = 0
    while (late < SOURCES) & (polls < limit):
        first = tl.zeros_like(address).to(tl.int32) + SOURCES
        for source in tl.static_range(SOURCES):
            words = load_unit(address + source * stride, keep, True)
            first = tl.where(is_missing(words), tl.minimum(first, source), first)
            sums = widen(words, BF16) if source == 0 else add(sums, widen(words, BF16))
        late = tl.min(first)
        polls += 1
    return sums, late


@triton.jit
def add_residual(sums, residual, BF16: tl.constexpr):
    """Words of the new residual, and its eight values as fp32."""
    total = widen(narrow(sums, BF16), BF16)
    words = narrow(add(total, widen(residual, BF16)), BF16)
    return words, widen(words, BF16)


@triton.jit
def square_sum(values, keep):
    """Sum of squares over a whole tile, fp32."""
    squares = values[0] * values[0]
    for i in tl.static_range(1, 8):
        squares += values[i] * values[i]
    return tl.sum(tl.where(keep, squares, 0.0))


@triton.jit
def wait_tags(address, call, keep, limit):
    """Sum of the fp32 values under this call's tags, and how many were missing at the limit."""
    missing = 1
    polls = 0
    total = 0.0
    while (missing != 0) & (polls < limit):
        tags = load_tag(address, keep)
        total = tl.sum(tl.where(keep, tag_value(tags), 0.0))
        missing = tl.sum((keep & is_stale(tags, call)).to(tl.int32))
        polls += 1
    return total, missing


@triton.jit
def gather(units, owner, keep, tags, tag_owner, tag_keep, call, limit, OWNERS: tl.constexpr):
    """Wait for a tile of units and, where tag_keep is true, for the tags that belong to them.

    Returns the words, the sum of the tags' values, and the first owner still missing at the limit
    (OWNERS when none is). One poll loads both, so the tags cost no hop of their own.
    """
    zero = tl.zeros_like(units).to(tl.int32)
    words = (zero, zero, zero, zero)
    squares = 0.0
    late = 0
    polls = 0
    while (late < OWNERS) & (polls < limit):
        words = load_unit(units, keep, True)
        found = load_tag(tags, tag_keep)
        squares = tl.sum(tl.where(tag_keep, tag_value(found), 0.0))
        late = tl.min(tl.where(is_missing(words), zero + owner, OWNERS))
        stale = tag_keep & is_stale(found, call)
        late = tl.minimum(late, tl.min(tl.where(stale, tag_owner, OWNERS)))
        polls += 1
    return words, squares, late


@triton.jit
def normalise(values, weight, squares, eps, HIDDEN: tl.constexpr, BF16: tl.constexpr):
    """Words of values * rsqrt(squares / HIDDEN + eps) * weight."""
    scale = tl.rsqrt(squares / HIDDEN + eps)
    gain = widen(weight, BF16)
    out = ()
    for i in tl.static_range(8):
        out = out + (values[i] * scale * gain[i],)
    return narrow(out, BF16)
