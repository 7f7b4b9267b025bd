"""Holes in what graphs cover: batches, draft lengths, rows, and graphs that do not pay."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.doctor.evidence import Evidence
from fastverify.graphs import Runner, Step, why_eager
from fastverify.machine.finding import Finding
from fastverify.show import spans

# Not captured because nothing runs there.
_NOTHING = ("nothing is drafted", "the only draft comes out of draft-extend")


def holes(evidence: Evidence) -> Iterator[Finding]:
    """Batches a server can reach that replay no graph."""
    given = evidence.measured.capture
    if given is None:
        return
    missing = list(range(1, given.max_running + 1))
    if given.batches:
        runner = Runner(given.rows, given.batches, given.phase, padding=given.padding)
        missing = [n for n in missing if why_eager(Step(n, given.rows), runner)]
    if missing:
        text = (
            f"{given.phase} of {spans(missing)} requests replays no graph (captured:"
            f" {spans(given.batches) or 'none'}); add those sizes to --cuda-graph-bs-decode."
        )
        yield Finding("warn", "capture-hole", text, "R13, R15")
    else:
        text = f"every batch up to {given.max_running} replays a {given.phase} graph."
        yield Finding("info", "capture-whole", text, "R13")


def planned(evidence: Evidence) -> Iterator[Finding]:
    """The same for the plan of a launch."""
    plan = evidence.plan
    if plan is None:
        return
    running = int(plan.value("max-running-requests") or 0)
    groups = {(shape.phase, shape.rows) for shape in plan.graphs.shapes}
    for phase, rows in sorted(groups):
        missing = [n for n in range(1, running + 1) if not plan.graphs.serving(phase, n, rows)]
        if missing:
            text = (
                f"{phase} of {spans(missing)} requests would replay no graph; raise the sizes given"
                " with --cuda-graph-bs-decode or lower --max-running-requests."
            )
            yield Finding("warn", "capture-hole", text, "R15")
    if evidence.machine is None or not evidence.machine.gpus:
        return
    for left in plan.graphs.exclusions:
        if left.reason not in _NOTHING:
            text = f"{left.phase} with {left.drafts} drafts replays no graph: {left.reason}."
            yield Finding("warn", "capture-hole", text, "R13")


def schedules(evidence: Evidence) -> Iterator[Finding]:
    """Draft lengths that a schedule can switch to without a graph of their own."""
    schedule = evidence.measured.schedule
    for low, high, drafts in schedule.lengths if schedule else ():
        batches = schedule.captured.get(drafts, ()) if schedule else ()
        largest = max(batches, default=0)
        if largest >= high:
            continue
        first = max(low, largest + 1)
        text = (
            f"K={drafts} is not captured for batch {first}..{high}, where the schedule switches to"
            " it; capture every length it can reach, or keep one length."
        )
        yield Finding("fail", "schedule-hole", text, "R04")


def buckets(evidence: Evidence) -> Iterator[Finding]:
    """Captured batches that are slower than without a graph."""
    slow = [b for b in evidence.measured.buckets if b.graph_ms > b.eager_ms]
    if slow:
        worst = max(slow, key=lambda bucket: bucket.graph_ms / bucket.eager_ms)
        text = (
            f"graphs of batch {spans([b.batch for b in slow])} are slower than no graph"
            f" ({worst.graph_ms:g} against {worst.eager_ms:g} ms at {worst.batch}); drop them and"
            " choose split counts for each batch size."
        )
        yield Finding("warn", "graph-slower", text, "R18")


def tuned(evidence: Evidence) -> Iterator[Finding]:
    """Row counts that will be served and were not tuned."""
    known, served = evidence.measured.tuned_rows, evidence.measured.served_rows
    missing = sorted(set(served) - set(known))
    if known and missing:
        text = (
            f"all-reduces of {spans(missing)} rows will be served and were not tuned (tuned:"
            f" {spans(known)}); tune batch x (drafts + 1) for every captured batch."
        )
        yield Finding("warn", "tuned-rows", text, "R63")


def draft_logits(evidence: Evidence) -> Iterator[Finding]:
    """A logits buffer sized for another vocabulary than the drafter's."""
    sizes = evidence.measured.draft_logits
    if sizes is not None and sizes[0] != sizes[1]:
        text = (
            f"the drafter's head gives {sizes[0]} logits and its graph buffer holds {sizes[1]};"
            " size the buffer from the vocabulary map, or draft-extend falls back to eager steps."
        )
        yield Finding("fail", "draft-logits-buffer", text, "R20")


CHECKS = (holes, planned, schedules, buckets, tuned, draft_logits)
