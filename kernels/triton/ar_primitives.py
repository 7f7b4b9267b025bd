"""What the all-reduce kernels are made of: 16-byte units, arrival marks, calls, errors.

A *unit* is 16 bytes: eight bf16 or fp16 values, handled as four 32-bit words. Data carries its own
arrival mark: a slot holds MARK in every word until the value arrives. A word is stored and loaded
whole, so no fence and no flag is needed, and words may arrive in any order. Every access to memory
that another rank writes or reads is relaxed at system scope, in PTX written out here, because
Triton's own store has no scope. MARK is a pair of NaNs that no arithmetic produces; `unmark`
replaces it in raw input by a pair of ordinary NaNs.

A *tag* is 8 bytes, stored whole: the call number in the upper half and an fp32 in the lower. It
needs no clearing and any number of readers may wait for it.

Reuse: slots alternate between two halves by call number. A reader clears what it has read before
its kernel ends, and no other kernel reads it. A peer writes the same half again two calls later;
to get there it finished the call between, for which it needed data that this rank sent after the
clearing kernel had ended. Every kernel here ends only after data of the same call from every peer,
directly or through the owner of a slice, so kernels may be mixed and shapes may change from call
to call. The call number is counted in device memory by the kernels, so a replayed graph goes on.

The interpreter has no inline PTX and truncates when it rounds to bf16; INTERPRETED selects the
equivalents.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

MARK = tl.constexpr(-1)
QUIET = tl.constexpr(0x7FFF7FFF)

# A call adds CALL to the counter, block by block, whatever its number of blocks: see `end_call`.
CALL_BITS = tl.constexpr(20)
CALL = tl.constexpr(1 << 20)

# Phases, in error words.
SCATTER = tl.constexpr(1)
CROSS = tl.constexpr(2)
GATHER = tl.constexpr(3)
TAGS = tl.constexpr(4)

# Faults for tests only: each takes out one protection.
NO_FAULT = tl.constexpr(0)
ONE_SLOT = tl.constexpr(1)
NO_CLEAR = tl.constexpr(2)
KEEP_MARKS = tl.constexpr(3)


_LOAD = (
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
    " mov.b32 $3, 0; @p ld.%sglobal.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
_STORE = (
    "{ .reg .pred p; setp.ne.s32 p, $6, 0; mov.b32 $0, 0;"
    " @p st.%sglobal.v4.b32 [$1], {$2, $3, $4, $5}; }"
)
LOAD_SHARED = tl.constexpr(_LOAD % "relaxed.sys.")
LOAD_LOCAL = tl.constexpr(_LOAD % "")
STORE_SHARED = tl.constexpr(_STORE % "relaxed.sys.")
STORE_LOCAL = tl.constexpr(_STORE % "")


@triton.jit
def load_unit(address, keep, SHARED: tl.constexpr):
    """Four words at each address, 0 where keep is false. SHARED: memory that peers write."""
    if INTERPRETED:
        at = address.to(tl.pointer_type(tl.int32))
        words = (
            tl.load(at, mask=keep, other=0),
            tl.load(at + 1, mask=keep, other=0),
            tl.load(at + 2, mask=keep, other=0),
            tl.load(at + 3, mask=keep, other=0),
        )
    else:
        words = tl.inline_asm_elementwise(
            LOAD_SHARED if SHARED else LOAD_LOCAL,
            "=&r,=&r,=&r,=&r,l,r",
            args=[address, keep.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def store_unit(address, words, keep, SHARED: tl.constexpr):
    """Store four words at each address where keep is true. SHARED: memory that others read."""
    if INTERPRETED:
        at = address.to(tl.pointer_type(tl.int32))
        for i in tl.static_range(4):
            tl.store(at + i, words[i], mask=keep)
    else:
        tl.inline_asm_elementwise(
            STORE_SHARED if SHARED else STORE_LOCAL,
            "=&r,l,r,r,r,r,r",
            args=[address, words[0], words[1], words[2], words[3], keep.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_tag(address, keep):
    """The tag at each address, 0 where keep is false."""
    if INTERPRETED:
        tag = tl.load(address.to(tl.pointer_type(tl.int64)), mask=keep, other=0)
    else:
        tag = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0;"
            " @p ld.relaxed.sys.global.b64 $0, [$1]; }",
            "=&l,l,r",
            args=[address, keep.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return tag


@triton.jit
def put_tag(address, call, value, lane):
    """Store one fp32 under the number of this call, both in one 8-byte access by lane 0.

    lane: a tile at least as long as the block has threads, so that one thread owns lane 0 and
    the store, which over PCIe costs a packet, happens once.
    """
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    zero = tl.zeros_like(lane).to(tl.int64)
    tag = zero + ((call << 32) | bits)
    address = zero + address
    keep = lane == 0
    if INTERPRETED:
        tl.store(address.to(tl.pointer_type(tl.int64)), tag, mask=keep)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.b64 [$1], $2; }",
            "=&r,l,l,r",
            args=[address, tag, keep.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def is_missing(words):
    """True where one of the four words has not arrived."""
    either = (words[0] == MARK) | (words[1] == MARK)
    return either | (words[2] == MARK) | (words[3] == MARK)


@triton.jit
def tag_value(tag):
    """The fp32 in a tag."""
    return tag.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def is_stale(tag, call):
    """True where a tag is not of this call."""
    return (tag >> 32).to(tl.int32) != call.to(tl.int32)


@triton.jit
def unmark(words, FAULT: tl.constexpr):
    """Replace words that equal the mark by a pair of NaNs that does not."""
    out = ()
    for i in tl.static_range(4):
        if FAULT == KEEP_MARKS:
            out = out + (words[i],)
        else:
            out = out + (tl.where(words[i] == MARK, QUIET, words[i]),)
    return out


@triton.jit
def clear_sources(address, stride, keep, SOURCES: tl.constexpr, FAULT: tl.constexpr):
    """Put the mark back into the units that `sum_sources` took."""
    # A thread must not clear what another thread of the block still awaits.
    tl.debug_barrier()
    if FAULT != NO_CLEAR:
        mark = tl.zeros_like(address).to(tl.int32) + MARK
        for source in tl.static_range(SOURCES):
            store_unit(address + source * stride, (mark, mark, mark, mark), keep, True)


@triton.jit
def pick(peers, step, COUNT: tl.constexpr):
    """peers[step], for a tensor of steps."""
    base = tl.zeros_like(step).to(tl.int64) + peers[0]
    for i in tl.static_range(1, COUNT):
        base = tl.where(step == i, peers[i], base)
    return base


@triton.jit
def begin_call(control, limit, FAULT: tl.constexpr):
    """Number of this call, half of the slots it uses (0 or 1), and how often a wait may poll.

    After an error a wait polls once: the calls that were queued behind it drain at once.
    """
    at = control.to(tl.pointer_type(tl.int64))
    call = tl.load(at, volatile=True) >> CALL_BITS
    error = tl.load(at + 1, volatile=True)
    half = call & 1
    if FAULT == ONE_SLOT:
        half = call & 0
    return call, half, tl.where(error == 0, limit, 1)


@triton.jit
def end_call(control, block, blocks, rows):
    """Count this call. The shares of all blocks add up to CALL, and a block adds its share last:
    until then the counter still rounds down to this call for a block that starts late.

    A call of 0 rows (to load the kernel) does not count.
    """
    share = tl.where(block == 0, CALL + 1 - blocks, 1)
    share = tl.where(rows > 0, share, 0).to(tl.int64)
    tl.atomic_add(control.to(tl.pointer_type(tl.int64)), share, sem="relaxed", scope="gpu")


@triton.jit
def report(control, call, phase, rank, peer):
    """Leave the first error of this rank in its control words: who waited for whom, and where."""
    code = (call << 24) | (phase << 16) | (rank << 8) | peer
    at = control.to(tl.pointer_type(tl.int64)) + 1
    none = code * 0
    tl.atomic_cas(at, none, code, sem="relaxed", scope="gpu")


@triton.jit
def stall(control, polls):
    """Test only: pass time between a read and what follows it."""
    at = control.to(tl.pointer_type(tl.int64))
    for _ in range(polls):
        tl.load(at + 2, volatile=True)
