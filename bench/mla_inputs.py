"""Inputs of the MLA verify benches: one call over pools that together exceed the L2 cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from fastverify.attention.ops import KV_DTYPES, Workspace, mla_verify
from fastverify.attention.plan import LATENT, ROPE, KvDtype, MlaVerifyPlan

WIDTH = LATENT + ROPE
# Softmax scale of Kimi-K2.5's heads (192 wide) with its YaRN factor.
SM_SCALE = 0.0721
# Two L2 caches of an H200: no call finds its keys there.
ROTATE_BYTES = 100 << 20
# bf16 output and bf16 weights of the softmax, against an fp32 reference; outputs are below 1.
TOLERANCE = 0.02

Call = Callable[[], object]


class Problem:
    """`batch` requests of `context` old keys and `rows` new ones, in `calls` separate pools."""

    def __init__(
        self, context: int, rows: int, heads: int, batch: int = 1, kv: KvDtype = "bf16"
    ) -> None:
        self.context, self.rows, self.heads, self.batch, self.kv = context, rows, heads, batch, kv
        self.total = context + rows
        slots = batch * self.total
        item = 2 if kv == "bf16" else 1
        self.kv_bytes = slots * WIDTH * item
        self.calls = max(4, math.ceil(ROTATE_BYTES / self.kv_bytes))
        torch.manual_seed(context * 31 + rows)
        self.pools = torch.empty(self.calls, slots, 1, WIDTH, dtype=KV_DTYPES[kv], device="cuda")
        for pool in self.pools:
            pool.copy_(torch.randn(slots, 1, WIDTH, dtype=torch.bfloat16, device="cuda"))
        self.q = torch.randn(batch * rows, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.outs = torch.zeros(
            self.calls, batch * rows, heads, LATENT, dtype=torch.bfloat16, device="cuda"
        )
        self.prefix = torch.full((batch,), context, dtype=torch.int64, device="cuda")

    def slots(self, dtype: torch.dtype) -> torch.Tensor:
        """Slots of each request in order: [batch, total]."""
        return torch.arange(self.batch * self.total, dtype=dtype, device="cuda").view(
            self.batch, self.total
        )

    def ours(self, plan: MlaVerifyPlan) -> list[Call]:
        """One mla_verify per pool, sharing a workspace as layers do."""
        table = torch.zeros(self.batch, plan.max_context, dtype=torch.int32, device="cuda")
        table[:, : self.total] = self.slots(torch.int32)
        workspace = Workspace.allocate(plan, "cuda")
        return [
            functools.partial(
                mla_verify, plan, workspace, self.q, pool, table, self.prefix,
                out=out, sm_scale=SM_SCALE,
            )
            for pool, out in zip(self.pools, self.outs, strict=True)
        ]  # fmt: skip

    def reference(self, call: int) -> torch.Tensor:
        """fp32 result of one pool: [tokens, heads, LATENT]."""
        keys = self.pools[call].float().view(self.batch, self.total, WIDTH)
        q = self.q.float().view(self.batch, self.rows, self.heads, WIDTH)
        scores = torch.einsum("brhd,bnd->brhn", q, keys) * SM_SCALE
        row = torch.arange(self.rows, device="cuda")
        position = torch.arange(self.total, device="cuda")
        hidden = position[None, :] > self.context + row[:, None]
        scores.masked_fill_(hidden[None, :, None, :], -math.inf)
        out = torch.einsum("brhn,bnd->brhd", scores.softmax(-1), keys[..., :LATENT])
        return out.reshape(-1, self.heads, LATENT)

    @functools.cached_property
    def references(self) -> dict[int, torch.Tensor]:
        """Results of the first and the last pool."""
        return {call: self.reference(call) for call in (0, self.calls - 1)}

    def error(self, outs: torch.Tensor | None = None) -> float:
        """Greatest difference of the first and last output from the reference; inf for NaN."""
        outs = self.outs if outs is None else outs
        worst = 0.0
        for call, want in self.references.items():
            difference = (outs[call].float() - want).abs().max().item()
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
        return worst


def replays_for(estimate_us: float, calls: int, budget_ms: float = 150.0) -> int:
    """Replays of a graph of `calls` calls that fit the budget: 3 .. 40."""
    return int(min(40, max(3, budget_ms * 1000 / max(estimate_us * calls, 1.0))))
