"""All-reduce + residual add + RMSNorm in one call, at both boundaries of a layer.

SGLang asks each layer, when it is built, which fused kernels may complete the sum that the layer
before left open. We stand first in both lists and decline what the chosen backend does not take;
SGLang then goes on with its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.layer_boundary.contracts import FfnInputFusion
from sglang.srt.layers.layer_boundary.fusions import allreduce as allreduce_fusions
from sglang.srt.layers.layer_boundary.layout import SumGroup
from sglang.srt.layers.layer_boundary.output import UnreducedOutput
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

from fastverify.comm.collective import Call, Collective, Fused, call_of
from fastverify.hooks.registry import Hook

FUSIONS = allreduce_fusions.__name__


class FusedNorm:
    """The two hooks. taken: calls that we completed, by boundary, for status and tests.

    active: the collective of this process, None before it is prepared.
    """

    def __init__(self, active: Callable[[], Collective | None]) -> None:
        self._active = active
        self.taken = {"after attention": 0, "after mlp": 0}

    def hooks(self) -> tuple[Hook, ...]:
        return (
            Hook(f"{FUSIONS}.ffn_input_fusions", self.around_ffn, HookType.AROUND),
            Hook(f"{FUSIONS}.attn_input_fusions", self.around_attention, HookType.AROUND),
        )

    def around_ffn(self, original: Callable[..., Any], plan: Any) -> tuple[Any, ...]:
        """AROUND `ffn_input_fusions(plan)`."""
        ours = FfnInputFusion(
            completes=SumGroup.ATTN_TP,
            run=partial(self._complete_attention, plan),
            # A promise that the residual is left alone, under which SGLang does not copy it for
            # EAGLE-3. It holds because `_complete` answers by the same rule.
            preserves_residual=lambda residual, batch: self._would_take(plan.norm, residual),
        )
        return (ours, *original(plan))

    def around_attention(
        self, original: Callable[..., Any], plan: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """AROUND `attn_input_fusions(plan, read)`."""
        return (partial(self._complete_mlp, plan), *original(plan, *args, **kwargs))

    def _complete_attention(
        self, plan: Any, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Any
    ) -> Fused | None:
        return self._complete("after attention", plan.norm, hidden, residual)

    def _complete_mlp(
        self, plan: Any, owed: Any, residual: torch.Tensor | None, batch: Any, addition: Any
    ) -> Fused | None:
        if (
            not isinstance(owed, UnreducedOutput)
            or addition is not None
            or owed.reduce_to_dp_local is not None
            or owed.complete_sum is not None
            or owed.group is not get_parallel().tp_group
        ):
            return None
        return self._complete("after mlp", plan.norm, owed.partial, residual)

    def _complete(
        self, boundary: str, norm: Any, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> Fused | None:
        collective = self._active()
        if collective is None or residual is None or not self._would_take(norm, hidden):
            return None
        weight = norm.weight.data
        if not hidden.dtype == residual.dtype == weight.dtype or hidden.shape != residual.shape:
            return None
        if not collective.supports(call_of(hidden, residual, weight)):
            return None
        result = collective.all_reduce_residual_rmsnorm(
            hidden, residual, weight, float(norm.variance_epsilon)
        )
        if result is not None:
            self.taken[boundary] += 1
        return result

    def _would_take(self, norm: Any, like: torch.Tensor) -> bool:
        collective = self._active()
        if collective is None or not plain_norm(norm) or not one_group():
            return False
        if like.dim() != 2 or norm.weight.dtype != like.dtype:
            return False
        call = call_of(like)
        return collective.supports(Call(call.rows, call.hidden, call.dtype, True, call.contiguous))


def plain_norm(norm: Any) -> bool:
    """True for the RMSNorm that our kernels compute, and no variant of it."""
    return (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )


def one_group() -> bool:
    """True when attention sums over the whole tensor-parallel group, all rows on each rank."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
    from sglang.srt.layers.layer_boundary import get_attn_tp_context

    parallel = get_parallel()
    return bool(
        parallel.tp_size > 1
        and parallel.attn_tp_size == parallel.tp_size
        # The sum of squares is taken in an order that depends on the kernel chosen for the rows.
        and not is_batch_invariant_mode_enabled()
        and not get_attn_tp_context().input_scattered
    )
