"""Time the parts and the whole of one rank's step, on the GPU or, as a smoke test, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import harness, layer_batch, layer_parts
from bench.layer_attention import declined_calls
from bench.layer_table import CHECK_LIMIT, Cell, Timing

BUDGET_S = 0.15
EAGER_PASSES = 2


class Rank:
    """A loaded model and the attention backend in use."""

    def __init__(self, runner: Any, backend: Any, batch: int) -> None:
        self.runner = runner
        self.backend = backend
        self.batch = batch
        self.on_gpu = torch.cuda.is_available()
        # Parts that depend on neither context nor backend, by row count.
        self.shared: dict[int, dict[str, Timing]] = {}
        self.shared_failed: dict[int, dict[str, str]] = {}

    def scope(self, batch: Any, *, capture: bool) -> Any:
        """Context of one step; capture mode only where graphs exist."""
        return layer_batch.step_scope(
            self.runner, self.backend, batch, capture=capture and self.on_gpu
        )


def capture_aux(model: Any, on: bool) -> None:
    """EAGLE-3's hidden state capture: on for verify, off for plain decode.

    The three default layers are distinct from seven layers on.
    """
    if on and model.config.num_hidden_layers >= 7:
        model.set_eagle3_layers_to_capture(None)
    else:
        model.capture_aux_hidden_states = False
        model.model.layers_to_capture = []


def sync() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def eager_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Wall time of one call launched without a graph, in us: the best of a few passes."""
    times = []
    for _ in range(EAGER_PASSES):
        sync()
        start = time.perf_counter()
        for call in calls:
            call()
        sync()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return min(times)


def time_calls(rank: Rank, batch: Any, calls: Sequence[Callable[[], Any]]) -> Timing:
    """Time one part: eagerly, and in one graph of all its calls."""
    with rank.scope(batch, capture=False):
        for call in calls:
            call()
        eager = eager_us(calls)
    if not rank.on_gpu:
        return Timing(us=eager, eager_us=eager)
    with rank.scope(batch, capture=True):
        samples = harness.graph_time_us(calls, budget_s=BUDGET_S)
    median, spread = harness.median_and_spread(samples)
    return Timing(median, spread, eager, [round(us, 3) for us in samples])


def measure_parts(
    rank: Rank, batch: Any, parts: dict[str, list[layer_parts.Call]]
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings of parts, and the reason for each part that failed."""
    timings: dict[str, Timing] = {}
    failed: dict[str, str] = {}
    for name, calls in parts.items():
        if not calls:
            continue
        try:
            timings[name] = time_calls(rank, batch, calls)
        except Exception as error:  # a part that fails must not cost the others
            failed[name] = reason(error)
    return timings, failed


def reason(error: BaseException) -> str:
    """One line that says what went wrong."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else 'no message'}"


def measure_step(rank: Rank, batch: Any, cell: Cell, reference: torch.Tensor) -> None:
    """Time the model's own forward as one graph; its logits are checked before and after."""
    model = rank.runner.model

    def forward() -> torch.Tensor:
        rank.backend.init_forward_metadata_in_graph(batch)
        return model.forward(batch.input_ids, batch.positions, batch).next_token_logits

    with rank.scope(batch, capture=False):
        cell.parts_error = layer_parts.relative_error(reference, forward())
        eager = eager_us([forward])
    if not rank.on_gpu:
        cell.step = Timing(us=eager, eager_us=eager)
        return
    with rank.scope(batch, capture=True):
        captured = harness.capture([forward])
        captured.graph.replay()
        before = layer_parts.relative_error(captured.output, reference)
        samples = harness.time_graph_us(captured.graph, budget_s=BUDGET_S)
        after = layer_parts.relative_error(captured.output, reference)
    cell.graph_error = max(before, after, key=lambda error: error if error == error else 1e9)
    if not cell.graph_error < CHECK_LIMIT:
        cell.failed["step"] = f"graph output is off by {cell.graph_error:.3g} of its norm"
        return
    median, spread = harness.median_and_spread(samples)
    cell.step = Timing(median, spread, eager, [round(us, 1) for us in samples])


def warm(rank: Rank, context: int, rows: int) -> None:
    """Run a step eagerly and in capture mode, so that no kernel compiles while time counts."""
    batch = layer_batch.step_batch(
        rank.runner, rank.backend, context=context, rows=rows, batch=rank.batch
    )
    layer_batch.plan_attention(rank.backend, batch)
    model = rank.runner.model
    for capture in (False, True):
        with rank.scope(batch, capture=capture):
            rank.backend.init_forward_metadata_in_graph(batch)
            model.forward(batch.input_ids, batch.positions, batch)
    sync()


def measure_cell(rank: Rank, cell: Cell) -> None:
    """Fill one cell in place; what fails leaves its reason in cell.failed.

    A contender that handed the batch back to SGLang is not credited with SGLang's time.
    """
    before = declined_calls(rank.backend)
    measure_all(rank, cell)
    after = declined_calls(rank.backend)
    if reasons := [why for why in after if after[why] != before.get(why, 0)]:
        cell.parts, cell.step = {}, None
        cell.failed = {"attention": f"declined: {', '.join(reasons)}"}


def measure_all(rank: Rank, cell: Cell) -> None:
    """The step and its parts at this cell's context and rows."""
    batch = layer_batch.step_batch(
        rank.runner, rank.backend, context=cell.context, rows=cell.rows, batch=cell.batch
    )
    layer_batch.plan_attention(rank.backend, batch)
    capture_aux(rank.runner.model, cell.rows > 1)
    with rank.scope(batch, capture=False):
        rank.backend.init_forward_metadata_in_graph(batch)
        step = layer_parts.run_composed(rank.runner.model, batch)
    cell.distinct_experts = layer_parts.distinct_experts(step.layers)
    try:
        measure_step(rank, batch, cell, step.logits)
    except Exception as error:  # the parts are still worth having
        cell.failed["step"] = reason(error)
    if cell.parts_error is not None and not cell.parts_error < CHECK_LIMIT:
        cell.failed["parts"] = f"parts differ from the model by {cell.parts_error:.3g}"
        return
    measure_cell_parts(rank, cell, batch, step)


def measure_cell_parts(rank: Rank, cell: Cell, batch: Any, step: layer_parts.ComposedStep) -> None:
    """Time the attention here, and the parts that no context changes once per row count."""
    if cell.rows not in rank.shared:
        parts = layer_parts.rotating_parts(rank.runner.model, step, batch)
        parts.pop("attention")
        timings, failed = measure_parts(rank, batch, parts)
        rank.shared[cell.rows] = timings
        rank.shared_failed[cell.rows] = failed
    attention = {"attention": layer_parts.attention_calls(rank.runner.model, step, batch)}
    timings, failed = measure_parts(rank, batch, attention)
    cell.parts = {**rank.shared[cell.rows], **timings}
    cell.failed.update(rank.shared_failed[cell.rows])
    cell.failed.update(failed)
