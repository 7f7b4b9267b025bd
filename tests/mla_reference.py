"""fp32 reference of MLA verify, and random and adversarial inputs for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch


@dataclasses.dataclass
class Case:
    """Inputs of one call, with totals (keys of each request, new rows included) on the host."""

    q: torch.Tensor
    kv: torch.Tensor
    table: torch.Tensor
    table_rows: torch.Tensor
    totals: list[int]
    rows: list[int]
    page_size: int = 1
    mask: torch.Tensor | None = None

    @property
    def qo_indptr(self) -> torch.Tensor:
        ends = torch.tensor([0, *self.rows]).cumsum(0)
        return ends.to(device=self.q.device, dtype=torch.int32)

    def seq_lens(self, *, prefix: bool, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        lens = [t - r if prefix else t for t, r in zip(self.totals, self.rows, strict=True)]
        return torch.tensor(lens, dtype=dtype, device=self.q.device)

    def full_mask(self) -> tuple[torch.Tensor, torch.Tensor]:
        """SGLang's flattened FULL_MASK and its offsets, from the rows x rows mask."""
        assert self.mask is not None
        flat = []
        for mask, total, rows in zip(self.mask, self.totals, self.rows, strict=True):
            whole = torch.ones(rows, total, dtype=torch.bool, device=self.q.device)
            whole[:, total - rows :] = mask[:rows, :rows] != 0
            flat.append(whole.flatten())
        sizes = torch.tensor([0, *(f.numel() for f in flat)]).cumsum(0)
        return torch.cat(flat), sizes.to(self.q.device)


def make_case(
    totals: Sequence[int],
    *,
    rows: Sequence[int],
    heads: int,
    latent: int = 512,
    rope: int = 64,
    page_size: int = 1,
    max_context: int | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    tree: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random inputs whose pages are scattered over a pool that holds garbage elsewhere.

    scale multiplies q, and with it the scores. Slots that no request owns hold NaN, so that a
    kernel that lets an unread key reach its output cannot pass.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    pages = [-(-t // page_size) for t in totals]
    reach = max(max_context or 0, max(totals, default=0), 1)
    pool_pages = sum(pages) + 7
    order = torch.randperm(pool_pages, generator=generator)
    kv = torch.randn(pool_pages * page_size, 1, latent + rope, generator=generator)
    unowned = torch.ones(pool_pages * page_size, dtype=torch.bool)
    table = torch.full((len(totals) + 2, -(-reach // page_size) + 1), 0, dtype=torch.int32)
    table_rows = torch.randperm(len(totals) + 2, generator=generator)[: len(totals)]
    taken = 0
    for row, total, count in zip(table_rows.tolist(), totals, pages, strict=True):
        own = order[taken : taken + count]
        taken += count
        table[row, :count] = own.to(torch.int32)
        slots = own[torch.arange(total) // page_size] * page_size + torch.arange(total) % page_size
        unowned[slots] = False
    kv[unowned] = math.nan
    tokens = sum(rows)
    q = torch.randn(tokens, heads, latent + rope, generator=generator) * scale
    mask = None
    if tree:
        most = max(rows)
        mask = (torch.rand(len(totals), most, most, generator=generator) < 0.5).to(torch.uint8)
        mask |= torch.eye(most, dtype=torch.uint8)
    return Case(
        q=q.to(torch.bfloat16).to(device),
        kv=kv.to(kv_dtype).to(device),
        table=table.to(device),
        table_rows=table_rows.to(device),
        totals=list(totals),
        rows=list(rows),
        page_size=page_size,
        mask=None if mask is None else mask.to(device),
    )


def request_keys(case: Case, request: int) -> torch.Tensor:
    """Keys of one request in order: fp32 [total, latent + rope]."""
    total = case.totals[request]
    position = torch.arange(total, device=case.kv.device)
    row = case.table[case.table_rows[request]]
    page = row[position // case.page_size].long()
    return case.kv[page * case.page_size + position % case.page_size, 0].float()


def reference(
    case: Case, *, sm_scale: float, latent: int = 512, k_scale: float = 1.0, v_scale: float = 1.0
) -> torch.Tensor:
    """fp32 [tokens, heads, latent], computed request by request without splitting."""
    outputs = []
    first = 0
    for request, (total, rows) in enumerate(zip(case.totals, case.rows, strict=True)):
        q = case.q[first : first + rows].float()
        first += rows
        keys = request_keys(case, request)
        scores = torch.einsum("rhd,nd->rhn", q, keys) * (sm_scale * k_scale)
        position = torch.arange(total, device=q.device)
        row = torch.arange(rows, device=q.device)
        new = position - (total - rows)
        if case.mask is None:
            seen = new[None, :] <= row[:, None]
        else:
            tree = case.mask[request][row][:, new.clamp(min=0)] != 0
            seen = (new < 0)[None, :] | tree
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        p = torch.softmax(scores, -1).nan_to_num(0.0) if total else scores
        outputs.append(torch.einsum("rhn,nd->rhd", p, keys[:, :latent]) * v_scale)
    return torch.cat(outputs)
