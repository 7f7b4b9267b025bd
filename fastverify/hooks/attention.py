"""Serves MLA verify, draft-extend and plain decode with our split-KV kernel.

Sits inside SGLang's Triton backend, which keeps everything else: prefill, metadata, KV writes,
graph capture. A batch our kernel cannot take is declined before anything is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookType

from fastverify.attention import plan as planning
from fastverify.attention.ops import KV_DTYPES, Workspace, mla_verify
from fastverify.hooks.registry import Hook

logger = logging.getLogger("fastverify")
BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
WIDTH = planning.LATENT + planning.ROPE
KV_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}


class Call(NamedTuple):
    """The arguments of a backend's `forward_extend` or `forward_decode`."""

    backend: Any
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    layer: Any
    forward_batch: Any
    save_kv_cache: bool
    extra: dict[str, Any]

    @staticmethod
    def parse(
        backend: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Call:
        """As SGLang passes them, by position or by name."""
        return Call(backend, q, k, v, layer, forward_batch, save_kv_cache, extra)

    def of(self, original: Callable[..., Any]) -> Any:
        """What SGLang would have done."""
        return original(*self[:-1], **self.extra)


class VerifyAttention:
    """The hooks, their plans by shape, and one workspace for all layers and phases.

    Target and drafter run one after the other on one stream, so they share the workspace.
    decode: whether plain decode goes through the kernel too.
    """

    def __init__(self, *, decode: bool) -> None:
        self._decode = decode
        self._plans: dict[tuple[Any, ...], planning.MlaVerifyPlan | None] = {}
        self._memory: torch.Tensor | None = None
        self.declined: dict[str, int] = {}
        self.served: dict[str, int] = {}

    def hooks(self) -> tuple[Hook, ...]:
        """All hooks of this feature."""
        found = [
            Hook(f"{BACKEND}.init_cuda_graph_state", self.after_graph_state, HookType.AFTER),
            Hook(f"{BACKEND}.forward_extend", self.around_extend, HookType.AROUND),
        ]
        if self._decode:
            found.append(Hook(f"{BACKEND}.forward_decode", self.around_decode, HookType.AROUND))
        return tuple(found)

    def after_graph_state(
        self, result: Any, backend: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """AFTER `init_cuda_graph_state`: take the workspace before anything is captured."""
        if not backend.use_mla:
            return
        rows = max(1, max_num_tokens // max_bs)
        kv = KV_NAMES.get(backend.token_to_kv_pool.dtype)
        plans = [self._plan(backend, batch, rows, kv) for batch in range(1, max_bs + 1)]
        sizes = [plan.workspace_bytes for plan in plans if plan is not None]
        if sizes:
            self._reserve(max(sizes), backend.device)

    def around_extend(
        self, original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND `forward_extend`: verify and draft-extend are ours, prefill is not."""
        call = Call.parse(backend, *args, **kwargs)
        mode = call.forward_batch.forward_mode
        out = None
        if mode.is_target_verify():
            out = self._serve("verify", call, call.forward_batch.seq_lens, lens_are_prefix=True)
        elif mode.is_draft_extend_v2():
            lens = _prefix_lens(backend, call.forward_batch)
            out = self._serve("draft_extend", call, lens, lens_are_prefix=True)
        return out if out is not None else call.of(original)

    def around_decode(
        self, original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND `forward_decode`; the steps of a drafter keep SGLang's kernel."""
        call = Call.parse(backend, *args, **kwargs)
        out = None
        if not backend.is_draft_runner and call.forward_batch.spec_info is None:
            out = self._serve("decode", call, call.forward_batch.seq_lens, lens_are_prefix=False)
        return out if out is not None else call.of(original)

    def _serve(
        self, phase: str, call: Call, lens: torch.Tensor, *, lens_are_prefix: bool
    ) -> torch.Tensor | None:
        backend, layer, forward_batch = call.backend, call.layer, call.forward_batch
        batch = forward_batch.batch_size
        query = call.q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        rows, rest = divmod(query.shape[0], max(batch, 1))
        reason = why_not(backend, layer, call.extra, uneven=bool(rest))
        plan = None
        if reason is None:
            pool = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
            plan = self._plan(backend, batch, rows, KV_NAMES.get(pool.dtype), query.shape[1])
            reason = None if plan else "no kernel for this GPU, cache type or row count"
        if plan is None:
            self._count(self.declined, f"{phase}: {reason}")
            return None
        if call.save_kv_cache and call.k is not None:
            loc = KVWriteLoc.for_batch(
                forward_batch, swa_loc=backend.forward_metadata.swa_out_cache_loc
            )
            backend._set_kv_buffer(forward_batch, layer, loc, call.k, call.v)
        self._count(self.served, phase)
        out = call.q.new_empty((query.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        mla_verify(
            plan,
            Workspace.view(plan, self._reserve(plan.workspace_bytes, call.q.device)),
            query,
            pool,
            backend.req_to_token,
            lens[:batch],
            out=out,
            sm_scale=layer.scaling,
            table_rows=forward_batch.req_pool_indices,
            lens_are_prefix=lens_are_prefix,
            **_mask(backend, phase),
        )
        return out.view(query.shape[0], -1)

    def _plan(
        self, backend: Any, batch: int, rows: int, kv: str | None, heads: int | None = None
    ) -> planning.MlaVerifyPlan | None:
        heads = heads or backend.num_head
        key = (batch, rows, heads, kv, backend.req_to_token.shape[1])
        if key not in self._plans:
            device = torch.device(backend.device)
            self._plans[key] = (
                planning.plan(
                    arch=planning.arch_name(torch.cuda.get_device_capability(device)),
                    sms=torch.cuda.get_device_properties(device).multi_processor_count,
                    heads=heads,
                    rows=rows,
                    batch=batch,
                    max_context=backend.req_to_token.shape[1],
                    kv="fp8" if kv == "fp8" else "bf16",
                )
                if kv is not None and 0 < rows <= planning.MAX_ROWS
                else None
            )
        return self._plans[key]

    def _reserve(self, size: int, device: Any) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
            logger.info("fastverify: MLA verify workspace is %.1f MB", size / 1e6)
        return self._memory

    def describe(self) -> str:
        """Which phases the kernel served so far, and what it declined."""
        served = ", ".join(sorted(self.served)) or "nothing yet"
        declined = "; ".join(sorted(self.declined))
        return f"{served} (declined {declined})" if declined else served

    @staticmethod
    def _count(counts: dict[str, int], name: str) -> None:
        counts[name] = counts.get(name, 0) + 1


def why_not(backend: Any, layer: Any, extra: dict[str, Any], *, uneven: bool) -> str | None:
    """Why the kernel cannot take this layer and batch; None when it can."""
    checks = (
        (not backend.use_mla or layer.qk_head_dim != WIDTH, "not absorbed MLA of 512 + 64"),
        (layer.v_head_dim != planning.LATENT or layer.tp_k_head_num != 1, "several KV heads"),
        (backend.dcp_size > 1, "decode context parallel"),
        (layer.k_scale is not None, "scaled fp8 keys"),
        (bool(layer.logit_cap) or (layer.sliding_window_size or -1) > -1, "cap or window"),
        (any(value is not None for value in extra.values()), "sinks or score modifiers"),
        (backend.kv_index_translator.is_translating, "a unified KV pool"),
        (backend.enable_deterministic, "deterministic mode keeps SGLang's kernel"),
        (uneven, "requests with different row counts"),
    )
    return next((reason for failed, reason in checks if failed), None)


def _mask(backend: Any, phase: str) -> dict[str, Any]:
    """SGLang's tree mask for topk > 1; a chain is causal, which needs no mask."""
    metadata = backend.forward_metadata
    if phase != "verify" or backend.topk <= 1 or metadata.custom_mask is None:
        return {}
    return {"mask": metadata.custom_mask, "mask_indptr": metadata.mask_indptr}


def _prefix_lens(backend: Any, forward_batch: Any) -> torch.Tensor:
    """Keys before the accepted rows of draft-extend, as SGLang's own metadata has them."""
    indptr = backend.forward_metadata.kv_indptr[: forward_batch.batch_size + 1]
    return indptr[1:] - indptr[:-1]
