"""Attention of SGLang's `intel_amx` backend in torch, computed in fp32."""

from __future__ import annotations

import torch


def _refuse_uncovered(
    name: str,
    k_scale: float,
    v_scale: float,
    is_cross_attn: bool,
    sliding_window: int,
    sinks: torch.Tensor | None,
) -> None:
    uncovered = {
        "cross attention": is_cross_attn,
        "a sliding window": sliding_window > 0,
        "attention sinks": sinks is not None,
        "a scaled KV cache": (k_scale, v_scale) != (1.0, 1.0),
    }
    for feature, present in uncovered.items():
        if present:
            raise NotImplementedError(f"{name}: {feature} is not covered by the CPU stand-in")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    logit_cap: float,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """q [rows, heads, d], k [keys, kv heads, d], v [keys, kv heads, dv] -> [rows, heads, dv].

    Head h reads KV head h // (heads / kv heads); `visible` [rows, keys] is True where allowed.
    """
    rows, heads, _ = q.shape
    grouped = q.float().view(rows, k.shape[1], heads // k.shape[1], -1)
    scores = torch.einsum("rkgd,skd->kgrs", grouped, k.float()) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    mixed = torch.einsum("kgrs,skd->rkgd", scores.softmax(-1), v.float())
    return mixed.reshape(rows, heads, -1)


def _keys(
    new: torch.Tensor | None, buffer: torch.Tensor, slots: torch.Tensor, rows: slice
) -> torch.Tensor:
    """Cached prefix then new tokens; without new tensors everything is in the cache already."""
    if new is None:
        return buffer[slots]
    fresh = new[rows]
    prefix = slots[: len(slots) - len(fresh)]
    # MLA's prefill without a prefix passes decompressed heads, which do not fit the latent cache.
    return fresh if len(prefix) == 0 else torch.cat([buffer[prefix].to(fresh.dtype), fresh])


def extend_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Attention of each request's new rows over its prefix and over themselves; fills `o`.

    `seq_lens` count prefix and new rows. Among themselves the new rows see what `tree_mask` says
    (one n x n block per request, packed), else causally.
    """
    name = "extend_attention_cpu"
    _refuse_uncovered(name, k_scale, v_scale, is_cross_attn, sliding_window, sinks)
    if not is_causal:
        raise NotImplementedError(f"{name}: non-causal attention is not covered by the stand-in")
    mask_at = 0
    lengths = (seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist())
    for request, total, count, start in zip(req_pool_indices.tolist(), *lengths, strict=True):
        rows = slice(start, start + count)
        visible = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        if tree_mask is not None:
            block = tree_mask[mask_at : mask_at + count * count]
            visible[:, total - count :] = block.view(count, count).bool()
            mask_at += count * count
        slots = req_to_token[request, :total].long()
        keys, values = _keys(k, k_buffer, slots, rows), _keys(v, v_buffer, slots, rows)
        o[rows] = _attend(q[rows], keys, values, sm_scale, logit_cap, visible).to(o.dtype)


def decode_attention_cpu(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    o: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of one row per sequence over its whole cache; fills `o`.

    Stores k and v at `loc` first: in this mode SGLang leaves the cache write to the kernel.
    """
    _refuse_uncovered(
        "decode_attention_cpu", k_scale, v_scale, is_cross_attn, sliding_window, sinks
    )
    if k is not None:
        k_buffer[loc] = k.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
    # MLA's value is the first part of its key and shares the memory: written already.
    if v is not None and v_buffer.data_ptr() != k_buffer.data_ptr():
        v_buffer[loc] = v.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    pairs = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for row, (request, total) in enumerate(pairs):
        slots = req_to_token[request, :total].long()
        query = q[row : row + 1]
        mixed = _attend(query, k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, None)
        o[row] = mixed[0].to(o.dtype)
