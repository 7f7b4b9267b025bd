"""KV slot bookkeeping: the tables that say which cache slot holds which token."""

from __future__ import annotations

import ctypes

import torch


def _cells(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row number and column of every cell in the ragged ranges start[i]..end[i], in row order."""
    lengths = end.long() - start.long()
    rows = torch.arange(lengths.numel()).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    columns = torch.arange(rows.numel()) - first[rows] + start.long()[rows]
    return rows, columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write `out_cache_loc`, packed by request, into req_to_token[request, start:end]."""
    rows, columns = _cells(start_offset, end_offset)
    slots = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[rows], columns] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read req_to_token[request, start:end] into `out_cache_loc`, packed by request."""
    rows, columns = _cells(start_offset, end_offset)
    slots = req_to_token[req_pool_indices.long()[rows], columns]
    out_cache_loc[: rows.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the topk * num_steps slots that follow each sequence."""
    assign_extend_cache_locs_cpu(
        req_pool_indices,
        req_to_token,
        seq_lens,
        seq_lens + topk * num_steps,
        out_cache_loc,
        pool_len,
    )


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """One slot table row per draft branch: [requests * topk, pool_len].

    The branches of a request share its prefix; branch j then continues with its own slots, which
    lie at seq_len + j * num_steps in the table of the request.
    """
    table = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    branch = torch.arange(topk).repeat(seq_lens.numel()).unsqueeze(1)
    target = seq_lens.long().repeat_interleave(topk).unsqueeze(1) + torch.arange(num_steps)
    return table.scatter(1, target, table.gather(1, target + branch * num_steps))


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy cache rows src_loc to tgt_loc in every buffer, all reads before all writes.

    `data_ptrs` are addresses and `strides` row sizes in bytes: the shapes never come here.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(address)
        cache = torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)
        cache[target] = cache[source]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """The last accepted token of each request, from rows of `accept_stride` tokens."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The slots of the accepted draft tokens, packed; -1 marks a rejected one."""
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]
