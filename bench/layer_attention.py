"""Attention backends of one rank: SGLang's own, and ours inside SGLang's Triton backend."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import layer_runner
from fastverify.errors import ConfigError

OURS = "fastverify"


def attention_backend(runner: Any, name: str, max_rows: int, batch: int) -> Any:
    """The attention backend called name, ready for captured verify of up to max_rows.

    Raises ConfigError when nothing of that name is registered or it refuses this machine.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        _build_backend_from_str,
    )
    from sglang.srt.runtime_context import get_context

    host = "triton" if name == OURS else name
    if host not in ATTENTION_BACKENDS:
        raise ConfigError(f"attention backend {name!r} is not registered with SGLang here.")
    get_context().override(
        "bench",
        speculative_num_draft_tokens=max_rows,
        speculative_num_steps=max_rows - 1,
        speculative_eagle_topk=1,
    )
    try:
        backend = _build_backend_from_str(
            model_runner=runner, backend_str=host, init_new_workspace=False
        )
    except (AssertionError, ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"attention backend {name!r} declined: {error}") from error
    backend.prefill_attention_backend_str = host
    backend.decode_attention_backend_str = host
    runner.kv_index_translator.bind_and_verify_backends([backend, None])
    if name == OURS:
        add_our_kernel(backend)
    if layer_runner.device() == "cuda":
        backend.init_cuda_graph_state(batch, batch * max_rows)
    return backend


def add_our_kernel(backend: Any) -> None:
    """Put our hooks on this one backend object, so that SGLang's stays beside it unhooked."""
    try:
        from fastverify.hooks.attention import VerifyAttention
    except ImportError as error:
        raise ConfigError(f"attention backend {OURS!r} declined: {error}") from error
    kernel = VerifyAttention(decode=True)
    original = type(backend)

    def init_cuda_graph_state(max_bs: int, max_num_tokens: int) -> None:
        original.init_cuda_graph_state(backend, max_bs, max_num_tokens)
        kernel.after_graph_state(None, backend, max_bs, max_num_tokens)

    backend.init_cuda_graph_state = init_cuda_graph_state
    backend.forward_extend = partial(kernel.around_extend, original.forward_extend, backend)
    backend.forward_decode = partial(kernel.around_decode, original.forward_decode, backend)
    backend.fastverify_kernel = kernel


def declined_calls(backend: Any) -> dict[str, int]:
    """How often our kernel handed a batch back, by reason; empty for SGLang's backends."""
    kernel = getattr(backend, "fastverify_kernel", None)
    return {} if kernel is None else dict(kernel.declined)
