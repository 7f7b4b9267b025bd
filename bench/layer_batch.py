"""One step's batch for a rank: plain decode of one row a request, or verify of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def step_batch(runner: Any, backend: Any, *, context: int, rows: int, batch: int) -> Any:
    """A ForwardBatch of `batch` requests with `context` cached tokens and `rows` new ones each.

    rows 1 is DECODE, more is TARGET_VERIFY of a chain with the full tree mask, as on CUDA.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    verify = rows > 1
    place = torch.device(runner.device)
    span = context + rows
    slots = assign_slots(runner, batch, span)
    # A verify step's length leaves out the rows it writes; a decode step's counts its one.
    length = context if verify else context + 1
    lengths = torch.full((batch,), length, dtype=torch.int64, device=place)
    seeded = torch.Generator(device=place).manual_seed(17)
    tokens = torch.randperm(runner.model_config.vocab_size, generator=seeded, device=place)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE,
        batch_size=batch,
        input_ids=tokens[: batch * rows],
        req_pool_indices=torch.arange(1, batch + 1, dtype=torch.int64, device=place),
        seq_lens=lengths,
        seq_lens_cpu=lengths.cpu(),
        orig_seq_lens=lengths,
        seq_lens_sum=batch * length,
        out_cache_loc=slots[:, context:].reshape(-1).contiguous(),
        positions=torch.arange(context, span, device=place).repeat(batch),
        spec_algorithm=SpeculativeAlgorithm.EAGLE3 if verify else SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.FULL if verify else CaptureHiddenMode.NULL,
        can_run_decode_cuda_graph=True,
    )
    if verify:
        forward_batch.spec_info = verify_input(backend, forward_batch, rows)
    runner.kv_index_translator.bind_runner_slots(forward_batch)
    return forward_batch


def assign_slots(runner: Any, batch: int, span: int) -> torch.Tensor:
    """Give requests 1 to batch consecutive KV slots; returns them, (batch, span).

    Slot 0 and request 0 are SGLang's own, for padding.
    """
    table = runner.req_to_token_pool.req_to_token
    slots = torch.arange(1, batch * span + 1, device=table.device).view(batch, span)
    table[1 : batch + 1, :span] = slots.to(table.dtype)
    return slots


def verify_input(backend: Any, forward_batch: Any, rows: int) -> Any:
    """EagleVerifyInput of a chain: each row sees the prefix and the rows before it."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    context = int(forward_batch.seq_lens_cpu[0])
    place = forward_batch.seq_lens.device
    mask = torch.ones(rows, context + rows, dtype=torch.bool, device=place)
    mask[:, context:] = torch.ones(rows, rows, dtype=torch.bool, device=place).tril()
    return EagleVerifyInput(
        draft_token=forward_batch.input_ids,
        custom_mask=mask.flatten().repeat(forward_batch.batch_size),
        positions=forward_batch.positions,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=rows - 1,
        topk=1,
        draft_token_num=rows,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=forward_batch.seq_lens_sum,
        seq_lens_cpu=forward_batch.seq_lens_cpu,
    )


def plan_attention(backend: Any, forward_batch: Any) -> None:
    """Let the backend plan this batch: as for a graph capture on CUDA, eagerly on a CPU."""
    if forward_batch.seq_lens.is_cuda:
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
    else:
        backend.init_forward_metadata(forward_batch)


@contextlib.contextmanager
def step_scope(runner: Any, backend: Any, forward_batch: Any, *, capture: bool) -> Iterator[None]:
    """What the model reads while a step runs; capture: SGLang's capture mode, two streams."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang.srt.runtime_context import get_model

    mode = model_capture_mode() if capture else contextlib.nullcontext()
    context = forward_context(ForwardContext(attn_backend=backend), forward_batch=forward_batch)
    layout = get_model().override(shared_experts=runner.model.shared_experts_config)
    with torch.no_grad(), mode, context, layout:
        yield
