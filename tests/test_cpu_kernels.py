"""The torch stand-in for `sgl_kernel`, function by function, against plain references."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from fastverify.cpu import sgl_kernel as kernels
from fastverify.cpu.attention import decode_attention_cpu, extend_attention_cpu

SEEDS = range(6)


def slot_table(requests: int = 5, length: int = 40) -> torch.Tensor:
    """A table whose every cell is a different slot."""
    return torch.randperm(requests * length).view(requests, length).int()


def ragged(seed: int) -> tuple[list[int], list[int], list[int]]:
    """Rows in mixed order with their start and end; one range may be empty."""
    chance = random.Random(seed)
    rows = chance.sample(range(5), 3)
    start = [chance.randrange(20) for _ in rows]
    end = [first + chance.randrange(15) for first in start]
    return rows, start, end


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_are_written_and_read_back_by_request(seed: int) -> None:
    rows, start, end = ragged(seed)
    table = torch.zeros(5, 40, dtype=torch.int32)
    expected = table.clone()
    total = sum(end) - sum(start)
    slots = torch.randint(1, 1000, (total,))
    fresh = iter(slots.tolist())
    for row, first, last in zip(rows, start, end, strict=True):
        for column in range(first, last):
            expected[row, column] = next(fresh)
    ranges = torch.tensor(rows), table, torch.tensor(start), torch.tensor(end)
    kernels.assign_req_to_token_pool_cpu(*ranges, slots, 40)
    assert torch.equal(table, expected)
    read = torch.full((total + 4,), -7)
    kernels.assign_extend_cache_locs_cpu(*ranges, read, 40)
    assert torch.equal(read[:total], slots)
    assert (read[total:] == -7).all()


def test_draft_slots_follow_each_sequence() -> None:
    table = slot_table()
    rows, lengths = torch.tensor([3, 0]), torch.tensor([7, 11])
    slots = torch.empty(2 * 2 * 3, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, slots, 40, 2, 3)
    assert slots.tolist() == [*table[3, 7:13].tolist(), *table[0, 11:17].tolist()]


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_draft_branches_share_the_prefix_and_own_their_steps(topk: int) -> None:
    steps, table = 3, slot_table()
    before = table.clone()
    rows, lengths = [4, 1, 2], [5, 0, 17]
    made = kernels.build_draft_decode_metadata_cpu(
        table, torch.tensor(rows), torch.tensor(lengths), topk, steps, 40
    )
    assert made.shape == (len(rows) * topk, 40)
    for index, (number, branch) in enumerate(itertools.product(range(3), range(topk))):
        row, length = table[rows[number]].tolist(), lengths[number]
        own = row[length + branch * steps : length + (branch + 1) * steps]
        assert made[index, : length + steps].tolist() == row[:length] + own
    assert torch.equal(table, before)


def test_cache_rows_are_copied_in_all_buffers_reads_first() -> None:
    buffers = [torch.randn(9, 3), torch.randint(0, 99, (9, 2, 5)), torch.randn(9, 4).bfloat16()]
    expected = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 8])
    for buffer in expected:
        buffer[target] = buffer[source].clone()
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    empty = torch.empty(0, dtype=torch.int64)
    kernels.copy_all_layer_kv_cache_cpu(addresses, strides, empty, empty)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


def test_bonus_token_is_the_last_accepted_one() -> None:
    bonus = torch.zeros(3, dtype=torch.int32)
    tokens = torch.arange(12).int()
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2]), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_accepted_slots_are_packed() -> None:
    packed = torch.full((4,), -1)
    index = torch.tensor([[0, -1], [2, 3]], dtype=torch.int32)
    kernels.fill_accept_out_cache_loc_cpu(index, torch.tensor([50, 51, 52, 53]), packed)
    assert packed.tolist() == [50, 52, 53, -1]


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """torch's own attention, in double precision, with KV heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


def cache(kv_heads: int, slots: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Separate key and value buffers, or for one KV head MLA's value inside its key."""
    if kv_heads == 1:
        keys = torch.randn(slots, 1, 24)
        return keys, keys[..., :16]
    return torch.randn(slots, kv_heads, 24), torch.randn(slots, kv_heads, 16)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_extend_attention(kv_heads: int, in_cache: bool, tree: bool) -> None:
    torch.manual_seed(kv_heads)
    keys, values = cache(kv_heads)
    table = slot_table()
    rows, counts, prefixes = [2, 0, 4], [3, 4, 1], [9, 0, 20]
    q = torch.randn(sum(counts), 4, 24)
    out = torch.empty(sum(counts), 4, 16)
    new_k, new_v = torch.randn(8, kv_heads, 24), torch.randn(8, kv_heads, 16)
    blocks = [torch.rand(n, n).lt(0.5).tril() | torch.eye(n).bool() for n in counts]
    starts = [0, 3, 7]
    extend_attention_cpu(
        q,
        None if in_cache else new_k,
        None if in_cache else new_v,
        out,
        keys,
        values,
        1.0,
        1.0,
        table,
        torch.tensor(rows),
        torch.tensor([n + p for n, p in zip(counts, prefixes, strict=True)]),
        torch.tensor(counts),
        torch.tensor(starts),
        max(counts),
        0.3,
        0.0,
        False,
        0,
        None,
        None,
        torch.cat([block.flatten() for block in blocks]) if tree else None,
        True,
    )
    for row, count, prefix, start, block in zip(
        rows, counts, prefixes, starts, blocks, strict=True
    ):
        slots = table[row, : prefix + count].long()
        own = slice(start, start + count)
        k, v = keys[slots], values[slots]
        if not in_cache:
            k = torch.cat([k[:prefix], new_k[own]])
            v = torch.cat([v[:prefix], new_v[own]])
        among = block if tree else torch.ones(count, count).tril().bool()
        mask = torch.cat([torch.ones(count, prefix).bool(), among], 1)
        torch.testing.assert_close(
            out[own].double(), plain_attention(q[own], k, v, 0.3, mask), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_decode_attention_stores_then_reads(kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    keys, values = cache(kv_heads)
    table, rows, lengths = slot_table(), [1, 3], [6, 13]
    newest = torch.tensor([table[r, n - 1] for r, n in zip(rows, lengths, strict=True)]).long()
    k = torch.randn(2, kv_heads, 24)
    v = k[..., :16] if kv_heads == 1 else torch.randn(2, kv_heads, 16)
    q, out = torch.randn(2, 4, 24), torch.empty(2, 4, 16)
    decode_attention_cpu(
        q,
        keys,
        values,
        1.0,
        1.0,
        out,
        k,
        v,
        newest,
        torch.empty(0),
        table,
        torch.tensor(rows),
        torch.tensor(lengths),
        0.3,
        0.0,
        False,
        0,
        None,
        None,
    )
    assert torch.equal(keys[newest], k)
    assert torch.equal(values[newest], v)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        slots = table[row, :length].long()
        expected = plain_attention(q[index : index + 1], keys[slots], values[slots], 0.3, None)
        torch.testing.assert_close(out[index : index + 1].double(), expected, rtol=1e-5, atol=1e-5)


def decode_once(**changed: object) -> torch.Tensor:
    """One decode row over three cached tokens; keyword arguments replace defaults."""
    torch.manual_seed(0)
    arguments: dict[str, object] = {
        "q": torch.randn(1, 2, 8),
        "k_buffer": torch.randn(5, 2, 8),
        "v_buffer": torch.randn(5, 2, 8),
        "k_scale": 1.0,
        "v_scale": 1.0,
        "o": torch.empty(1, 2, 8),
        "k": None,
        "v": None,
        "loc": torch.tensor([0]),
        "attn_logits": torch.empty(0),
        "req_to_token": torch.tensor([[4, 1, 2]]),
        "req_pool_indices": torch.tensor([0]),
        "seq_lens": torch.tensor([3]),
        "sm_scale": 0.5,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window": 0,
        "encoder_lens": None,
        "sinks": None,
    } | changed
    decode_attention_cpu(**arguments)  # type: ignore[arg-type]
    return arguments["o"]  # type: ignore[return-value]


def test_a_logit_cap_bounds_the_scores() -> None:
    wide, narrow = decode_once(logit_cap=1e6), decode_once(logit_cap=1e-6)
    torch.testing.assert_close(wide, decode_once())
    torch.manual_seed(0)
    torch.randn(1, 2, 8)
    torch.randn(5, 2, 8)
    # Equal scores make attention a mean.
    torch.testing.assert_close(narrow[0], torch.randn(5, 2, 8)[[4, 1, 2]].mean(0))


@pytest.mark.parametrize(
    ("changed", "feature"),
    [
        ({"is_cross_attn": True}, "cross attention"),
        ({"sliding_window": 5}, "sliding window"),
        ({"sinks": torch.ones(2)}, "attention sinks"),
        ({"k_scale": 0.5}, "scaled KV cache"),
    ],
)
def test_uncovered_attention_is_refused_by_name(changed: dict[str, object], feature: str) -> None:
    with pytest.raises(NotImplementedError, match=f"decode_attention_cpu: .*{feature}"):
        decode_once(**changed)


def test_uncovered_functions_say_their_name() -> None:
    with pytest.raises(NotImplementedError, match="sgl_kernel.rotate_input_ids_cpu is not covered"):
        kernels.rotate_input_ids_cpu(1, 2)
    # SGLang asks for CUDA functions to learn whether they exist.
    assert not hasattr(kernels, "moe_fused_gate")


def test_the_attention_operators_are_attached() -> None:
    kernels.attach_operators()
    assert torch.ops.sgl_kernel.extend_attention_cpu is extend_attention_cpu
    assert torch.ops.sgl_kernel.decode_attention_cpu is decode_attention_cpu
