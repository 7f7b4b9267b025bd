"""Which steps of serving replay a CUDA graph: what must be captured, and why a step goes eager.

Pure. `rows` are the tokens one request brings into a step: 1 for decode, drafts + 1 for verify.
The rules are those of SGLang 0.5.23 (`can_run_graph` of its three decode-family runners).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fastverify.errors import ConfigError

Phase = Literal["decode", "verify", "draft", "draft_extend"]

# Attention backends for which SGLang 0.5.23 captures draft-extend of an MLA or MHA drafter.
EXTEND_CAPTURED = {
    "mla": frozenset({"triton", "trtllm_mla", "flashmla", "fastverify"}),
    "mha": frozenset({"triton", "trtllm_mha", "flashinfer", "fa3"}),
}


class Shape(msgspec.Struct, frozen=True, order=True):
    """One captured graph: phase, batch (requests) and rows (tokens a request)."""

    phase: Phase
    batch: int
    rows: int


class Exclusion(msgspec.Struct, frozen=True):
    """A phase that is not captured for one draft length, and the reason."""

    phase: Phase
    drafts: int
    reason: str


class CapturePlan(msgspec.Struct, frozen=True):
    """Every graph that serving can ask for, and what is left out on purpose."""

    shapes: tuple[Shape, ...]
    exclusions: tuple[Exclusion, ...] = ()

    def serving(self, phase: Phase, batch: int, rows: int) -> Shape | None:
        """The captured shape a step of `batch` requests is padded to; None means eager."""
        fits = [s for s in self.shapes if (s.phase, s.rows) == (phase, rows) and s.batch >= batch]
        return min(fits, key=lambda s: s.batch, default=None)


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """Captured batch sizes up to max_running: all to 8, then gaps that cost little padding."""
    if max_running < 1:
        raise ConfigError(
            f"max-running-requests is {max_running}, but a server needs at least 1: raise it."
        )
    sizes = [*range(1, 9), *range(10, 33, 2), *range(36, 65, 4), *range(72, 257, 8)]
    kept = [size for size in sizes if size < max_running]
    return (*kept, max_running)


def check_lengths(lengths: tuple[int, ...], limit: int) -> None:
    """Refuse draft lengths that no drafter can serve. lengths: drafts a step, 0 for none."""
    if not lengths:
        raise ConfigError(
            "the list of draft lengths is empty, but at least one is needed: give 0 for none."
        )
    for drafts in lengths:
        if not 0 <= drafts <= limit:
            raise ConfigError(
                f"draft length {drafts} is outside 0 to {limit}: choose lengths in that range."
            )


def capture_plan(
    lengths: tuple[int, ...],
    batches: tuple[int, ...],
    *,
    drafter: Literal["mla", "mha"] | None,
    draft_backend: str | None,
    switched_off: str | None = None,
) -> CapturePlan:
    """The graphs for the given draft lengths and captured batch sizes.

    lengths: drafts a step; empty when the server does not speculate at all.
    drafter, draft_backend: the drafter's attention kind and backend, which decide draft-extend.
    switched_off: why no graph is captured at all, None when graphs are on.
    """
    shapes: list[Shape] = []
    left_out: list[Exclusion] = []
    speculative: tuple[Phase, ...] = ("verify", "draft", "draft_extend")
    decode: tuple[Phase, int] = ("decode", 0)
    for phase, drafts in [(p, n) for n in lengths for p in speculative] or [decode]:
        reason = switched_off or _exclusion(phase, drafts, drafter, draft_backend)
        if reason:
            left_out.append(Exclusion(phase, drafts, reason))
            continue
        rows = drafts + 1 if phase in ("verify", "draft_extend") else 1
        shapes += [Shape(phase, batch, rows) for batch in batches]
    # Two lengths can ask for the same draft graph: it has one row whatever the length.
    return CapturePlan(tuple(sorted(set(shapes))), tuple(left_out))


def _exclusion(phase: str, drafts: int, drafter: str | None, backend: str | None) -> str | None:
    if phase == "draft" and drafts == 0:
        return "nothing is drafted"
    if phase == "draft" and drafts == 1:
        return "the only draft comes out of draft-extend"
    if phase == "draft_extend" and drafter and backend not in EXTEND_CAPTURED[drafter]:
        return f"SGLang does not capture draft-extend of an {drafter.upper()} drafter on {backend}"
    return None


class Step(msgspec.Struct, frozen=True):
    """What one step of serving asks of a runner; the defaults are the usual case."""

    batch: int
    rows: int
    replaces_embeddings: bool = False
    peers_can_graph: bool = True
    encoder_rows: tuple[int, ...] = (1,)
    two_batch_overlap_ready: bool = True
    input_rows: int | None = None


class Runner(msgspec.Struct, frozen=True):
    """What one SGLang graph runner captured, and the modes that add conditions."""

    rows: int
    batches: tuple[int, ...]
    phase: Phase = "verify"
    padding: bool = True
    needs_peers: bool = False
    encoder_decoder: bool = False
    two_batch_overlap: bool = False
    ngram: bool = False


def why_eager(step: Step, runner: Runner | None) -> str | None:
    """The first reason for which SGLang runs the step without a graph; None when it replays."""
    if runner is None:
        return "no graph was captured for this phase"
    target = runner.phase in ("verify", "decode")
    checks = (
        (target and step.replaces_embeddings, "a request replaces its embeddings"),
        (
            step.rows > 0 and step.rows != runner.rows,
            f"{step.rows} rows a request, captured for {runner.rows}",
        ),
        (
            runner.padding and step.batch > max(runner.batches),
            f"batch {step.batch} is above the largest captured, {max(runner.batches)}",
        ),
        (
            not runner.padding and step.batch not in runner.batches,
            f"batch {step.batch} is not captured and padding is off",
        ),
        (
            runner.needs_peers and not step.peers_can_graph,
            "another data-parallel rank cannot replay",
        ),
        (
            target and runner.encoder_decoder and any(n <= 0 for n in step.encoder_rows),
            "a request has no encoder rows",
        ),
        (
            target and runner.two_batch_overlap and not step.two_batch_overlap_ready,
            "the batch cannot be split for two-batch overlap",
        ),
        (
            target
            and runner.ngram
            and step.input_rows is not None
            and step.input_rows != step.batch * runner.rows,
            f"n-gram drafts gave {step.input_rows} rows, captured for {step.batch * runner.rows}",
        ),
    )
    return next((reason for failed, reason in checks if failed), None)
