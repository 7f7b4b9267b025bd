"""Observes verify: batch, draft tokens, graph or eager, accepted drafts. Changes nothing."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from fastverify import reports
from fastverify.graphs import Runner, Step, why_eager
from fastverify.hooks.registry import Hook

logger = logging.getLogger("fastverify")
WORKER = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
FLUSH_SECONDS = 0.5


class VerifyObserver:
    """Counts verify steps of this process and leaves the counts in the run folder.

    The hot path only adds to integers; a thread writes them out at most every FLUSH_SECONDS.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self.counts = reports.VerifyCounts()
        self._folder = folder
        self._said_greedy = False
        self._changed = threading.Event()
        if folder is not None:
            threading.Thread(target=self._flush, name="fastverify-counts", daemon=True).start()

    def hooks(self) -> tuple[Hook, ...]:
        """The two hooks this observer lives from."""
        return (
            Hook(f"{WORKER}.verify", self.around_verify, HookType.AROUND),
            Hook(f"{WORKER}.on_verify_complete_cpu", self.before_complete, HookType.BEFORE),
        )

    def around_verify(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND `EAGLEWorkerV2.verify(batch, pp_proxy_tensors, grammar_barrier)`."""
        # Read before the call: verify replaces the batch's tensors.
        requests = len(batch.seq_lens)
        if not self._said_greedy and str(worker.device) == "cpu":
            self._warn_if_sampled(batch)
        result = original(worker, batch, *args, **kwargs)
        if requests and not batch.forward_mode.is_idle():
            rows = int(worker.speculative_num_draft_tokens)
            self._count(worker, requests, rows, bool(result.can_run_cuda_graph))
        return result

    def before_complete(
        self, worker: Any, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """BEFORE `EAGLEWorkerV2.on_verify_complete_cpu`; runs one batch late under overlap."""
        for accepted in num_correct_drafts_per_req:
            number = int(accepted)
            self.counts.accepted[number] = self.counts.accepted.get(number, 0) + 1
        self._changed.set()

    def _warn_if_sampled(self, batch: Any) -> None:
        if batch.sampling_info is not None and not batch.sampling_info.is_all_greedy:
            self._said_greedy = True
            logger.warning(
                "fastverify: a request asks for sampling, and on the CPU SGLang verifies drafts"
                " greedily at any temperature: only its first token was sampled"
            )

    def _count(self, worker: Any, requests: int, rows: int, graph: bool) -> None:
        counts = self.counts
        if graph:
            counts.graph_steps += 1
        else:
            counts.eager_steps += 1
            self._explain(worker, requests, rows)
        key = f"{requests} x {rows}, {'graph' if graph else 'eager'}"
        counts.steps[key] = counts.steps.get(key, 0) + 1
        self._changed.set()

    def _explain(self, worker: Any, requests: int, rows: int) -> None:
        runner = worker.target_worker.model_runner.decode_cuda_graph_runner
        known = runner_facts(runner)
        reason = why_eager(Step(batch=requests, rows=rows), known) or "SGLang gives no reason"
        seen = self.counts.eager_reasons.get(reason, 0)
        self.counts.eager_reasons[reason] = seen + 1
        if not seen and known is not None:
            logger.warning("fastverify: a verify step ran without a graph: %s", reason)

    def _flush(self) -> None:
        assert self._folder is not None
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                reports.write(self._folder, "verify.json", self.counts)
            except (OSError, RuntimeError):  # the folder is gone, or a dict grew while encoding
                self._changed.set()
            threading.Event().wait(FLUSH_SECONDS)


def runner_facts(runner: Any) -> Runner | None:
    """What one of SGLang's graph runners captured; None when there is no runner."""
    if not runner:
        return None
    return Runner(
        rows=int(runner.captured_req_width),
        batches=tuple(int(size) for size in runner.capture_bs),
        padding=not getattr(runner, "disable_padding", False),
        needs_peers=bool(getattr(runner, "require_mlp_sync", False)),
    )
