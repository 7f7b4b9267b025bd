"""The all-reduce that defines the others: gathers every input and adds in rank order, in torch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastverify.comm.collective import Call, Collective, Fused, call_of


class Reference(Collective):
    """Any shape, any device of the group's backend (gloo: CPU). Slow, and exact by definition."""

    name = "reference"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._world = dist.get_world_size(group)

    def why_not(self, call: Call) -> str | None:
        return None if call.rows else "a call of no rows"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.why_not(call_of(x)):
            return None
        source = x.contiguous()
        inputs = [torch.empty_like(source) for _ in range(self._world)]
        dist.all_gather(inputs, source, group=self._group)
        total = inputs[0].float()
        for other in inputs[1:]:
            total += other.float()
        return total.to(x.dtype)

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        call_of(x, residual, weight)
        total = self.all_reduce(x)
        return None if total is None else add_norm(total, residual, weight, eps)


def add_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Fused:
    """(norm, new residual): the residual is rounded, and the norm reads it rounded."""
    new = (total.float() + residual.float()).to(residual.dtype)
    value = new.float()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(residual.dtype), new
