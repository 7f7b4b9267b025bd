"""Backends that reduce with one kernel and add and normalise with another."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fastverify.comm.collective import Call, Collective, Fused, call_of

AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


def sglang_add_norm() -> AddNorm:
    """SGLang's fused add + RMSNorm kernel; it overwrites its first two arguments."""
    from sgl_kernel import fused_add_rmsnorm

    kernel: AddNorm = fused_add_rmsnorm
    return kernel


class Unfused(Collective):
    """An all-reduce of its own, and a fused add + norm after it."""

    _add_norm: AddNorm

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        if self.why_not(call_of(x, residual, weight)):
            return None
        total = self.all_reduce(x)
        assert total is not None
        new = residual.clone()
        self._add_norm(total, new, weight, eps)
        return total, new


class Nccl(Unfused):
    """NCCL through torch, which can be captured, and a fused add + norm. Takes everything."""

    name = "nccl"

    def __init__(self, group: dist.ProcessGroup, add_norm: AddNorm) -> None:
        self._group = group
        self._add_norm = add_norm

    def why_not(self, call: Call) -> str | None:
        if not call.rows:
            return "a call of no rows"
        return None if call.contiguous else "a tensor is not contiguous"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.why_not(call_of(x)):
            return None
        total = x.clone()
        dist.all_reduce(total, group=self._group)
        return total
