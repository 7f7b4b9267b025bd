"""What server logs show: eager steps, acceptance, switched-off paths, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fastverify.doctor.evidence import Evidence
from fastverify.graphs import Runner, Step, why_eager
from fastverify.logs.server import Decode, Load, ServerLog
from fastverify.logs.troubles import MEANINGS, Trouble
from fastverify.machine.finding import Finding, Severity

# A drafter that is never right still yields the bonus token; two decimals are printed.
DEAD = 1.005
DEAD_LINES = 3
_PHASES = {
    "start": " at start",
    "capture": " while graphs were captured",
    "replay": " at the first replay of captured graphs",
}
_DRAFTER = re.compile(r"nextn|mtp|eagle", re.IGNORECASE)


def not_captured(evidence: Evidence) -> Iterator[Finding]:
    """Full graphs given up for attention, which a speculating server pays with each verify."""
    for log in evidence.servers:
        if not log.piecewise:
            continue
        why = f" because of {log.eager_backend.rstrip(',.')}" if log.eager_backend else ""
        if log.speculative:
            text = (
                f"verify is not captured: the server fell back to piecewise graphs{why} and runs"
                " attention eagerly, 25 instead of 107 tok/s at 30k tokens in one report; choose an"
                " attention backend with full graphs for several rows."
            )
            yield Finding("fail", "verify-not-captured", text, "R02, R12")
        else:
            text = f"the server captured piecewise graphs only{why}; attention runs eagerly."
            yield Finding("info", "piecewise-graphs", text, "R12")


def eager_steps(evidence: Evidence) -> Iterator[Finding]:
    """Decode lines without a graph, and which batch size misses it."""
    for log in evidence.servers:
        said = [decode for decode in log.decodes if decode.graph is not None]
        eager = [decode for decode in said if not decode.graph]
        if not eager:
            continue
        batches = sorted({decode.running for decode in eager})
        shown = ", ".join(map(str, batches[:8])) + (", .." if len(batches) > 8 else "")
        text = (
            f"{len(eager)} of {len(said)} decode lines ran without a graph, at {shown} running"
            f" requests{_slower(said)}{_cause(log, batches[0])}; capture those batch sizes with"
            " --cuda-graph-bs-decode."
        )
        yield Finding("warn", "eager-steps", text, "R12, R13")


def _slower(said: Sequence[Decode]) -> str:
    def rate(graph: bool) -> float:
        found = [d.tokens_per_s for d in said if d.graph is graph and d.tokens_per_s]
        return sum(found) / len(found) if found else 0.0

    eager, graph = rate(False), rate(True)
    return f", {eager:.0f} against {graph:.0f} tok/s" if eager and graph else ""


def _cause(log: ServerLog, batch: int) -> str:
    for capture in log.captures:
        if capture.role == "target verify" and capture.batches and capture.rows:
            padded = log.arguments.get("disable_cuda_graph_padding") != "True"
            runner = Runner(capture.rows, capture.batches, padding=padded)
            reason = why_eager(Step(batch, capture.rows), runner)
            return f" ({reason})" if reason else ""
    return ""


def draft_extend(evidence: Evidence) -> Iterator[Finding]:
    """A server that captured verify and not draft-extend runs the latter eagerly each step."""
    for log in evidence.servers:
        roles = {capture.role for capture in log.captures}
        served = bool(log.decodes)
        if "target verify" in roles and "draft extend" not in roles and served:
            text = (
                "draft-extend was not captured and runs eagerly in every step; use"
                " --speculative-draft-attention-backend triton."
            )
            yield Finding("warn", "draft-extend-eager", text, "R20")


def accepted(evidence: Evidence) -> Iterator[Finding]:
    """Acceptance that collapsed to the bonus token alone, and the mean otherwise."""
    for log in evidence.servers:
        lengths = [d.accept_length for d in log.decodes if d.accept_length is not None]
        lengths = lengths or [window.length for window in log.windows]
        if not lengths:
            continue
        tail = 0
        while tail < len(lengths) and lengths[-1 - tail] <= DEAD:
            tail += 1
        if tail < DEAD_LINES:
            mean = sum(lengths) / len(lengths)
            text = (
                f"the mean accept length over {len(lengths)} log lines is {mean:.2f} tokens a"
                " verify step, bonus token included."
            )
            yield Finding("info", "acceptance", text, "R104")
        elif tail < len(lengths):
            alive = sum(lengths[:-tail]) / (len(lengths) - tail)
            when = " after a weight update" if log.updated_at is not None else ""
            text = (
                f"the accept length fell from {alive:.2f} to 1.00 and stayed there for {tail}"
                f" lines{when}: the drafter is dead; load its weights and its tied head again."
            )
            yield Finding("fail", "draft-dead", text, "R77")
        else:
            text = (
                f"not one draft was accepted in {tail} log lines: either peer memory delivers wrong"
                " data, so start once with --disable-custom-all-reduce, or the drafter is dead or"
                " mapped wrongly, so check it with `fastverify doctor --model TARGET --draft"
                " DRAFTER`."
            )
            yield Finding("fail", "accept-zero", text, "R43, R77, R98")


def definition(evidence: Evidence) -> Iterator[Finding]:
    """Which accept rate a log prints; only accept lengths compare between engines."""
    drafts = evidence.draft_length
    for log in evidence.servers:
        for decode in log.decodes:
            length, rate = decode.accept_length, decode.accept_rate
            if length is None or rate is None or length <= DEAD or not drafts:
                continue
            yield from _defined(length, rate, drafts)
            break


def _defined(length: float, rate: float, drafts: int) -> Iterator[Finding]:
    known = {
        "drafts only": (length - 1) / drafts,
        "bonus token included": length / (drafts + 1),
    }
    close = [name for name, value in known.items() if abs(value - rate) < 0.015]
    if close:
        text = (
            f"accept rate {rate:.2f} at accept length {length:.2f} and {drafts} drafts counts"
            f" {close[0]}; compare engines by accept length only."
        )
        yield Finding("info", "accept-rate-definition", text, "R104")
    elif abs(length / drafts - rate) < 0.015:
        text = (
            f"accept rate {rate:.2f} is accept length {length:.2f} / {drafts} drafts, an old bug"
            f" that gives rates above 1; the rate is {known['drafts only']:.2f}, update the server."
        )
        yield Finding("warn", "accept-rate-bug", text, "R104")
    else:
        text = (
            f"accept rate {rate:.2f} fits no definition for accept length {length:.2f} and {drafts}"
            " drafts; trust the accept length only."
        )
        yield Finding("warn", "accept-rate-odd", text, "R104")


def gates(evidence: Evidence) -> Iterator[Finding]:
    """Fast paths that switched themselves off, many lines as one."""
    found = [gate for log in evidence.servers for gate in log.gates]
    for reason in dict.fromkeys(gate.reason for gate in found):
        ours = [gate for gate in found if gate.reason == reason]
        names = " and ".join(dict.fromkeys(gate.name for gate in ours))
        lines = sum(gate.count for gate in ours)
        why = {"two PCIe-only GPUs": "more than two GPUs without NVLink"}.get(reason, reason)
        text = (
            f"{names} switched off ({why}; {lines} log lines): all tensor-parallel all-reduces go"
            " through NCCL."
        )
        severity: Severity = "warn" if "P2P test failed" in reason else "info"
        yield Finding(severity, "custom-allreduce-gate", text, "R55, R64")


def loads(evidence: Evidence) -> Iterator[Finding]:
    """A drafter that was loaded with its target's quantisation."""
    for log in evidence.servers:
        target: Load | None = None
        for load in log.loads:
            drafter = _DRAFTER.search(load.architecture) is not None
            if not drafter:
                target = load
            elif (
                target is not None
                and load.quantization
                and load.quantization == target.quantization
            ):
                text = (
                    f"drafter {load.architecture} was loaded as {load.quantization}, like its"
                    " target; if its own files are bf16, start with"
                    " --speculative-draft-model-quantization unquant."
                )
                yield Finding("warn", "draft-quant", text, "R100")


def updates(evidence: Evidence) -> Iterator[Finding]:
    """Weights replaced under captured graphs, which keep the old addresses."""
    for log in evidence.servers:
        if log.updated_at is not None and log.captures:
            text = (
                "weights were updated after graphs were captured, and graphs keep raw addresses;"
                " capture again after an update, and update the drafter too."
            )
            yield Finding("warn", "weights-moved", text, "R76, R77")


def troubles(evidence: Evidence) -> Iterator[Finding]:
    """Each kind of error once, with its meaning."""
    found = [trouble for log in evidence.servers for trouble in log.troubles]
    cached = any(log.cached_prefill for log in evidence.servers)
    yield from _first(found)
    for kind in dict.fromkeys(trouble.kind for trouble in found):
        meaning = MEANINGS[kind]
        ours = [trouble for trouble in found if trouble.kind == kind]
        ranks = sorted({t.rank for t in ours if t.rank is not None})
        who = f" on rank {', '.join(map(str, ranks[:8]))}" if ranks else ""
        when = _PHASES.get(ours[0].phase, "")
        hint = " after a prefix-cache hit" if kind == "nan-logits" and cached else ""
        text = f"error{who}{when}{hint}: {meaning.text}."
        yield Finding(meaning.severity, kind, text, meaning.source)


def _first(found: Sequence[Trouble]) -> Iterator[Finding]:
    """The error that came before the timeouts of the other ranks."""
    timed = [t for t in found if t.time is not None]
    causes = [t for t in timed if not MEANINGS[t.kind].follows]
    echoes = [t.time for t in timed if MEANINGS[t.kind].follows and t.time is not None]
    if not causes or not echoes:
        return
    root = min(causes, key=lambda trouble: trouble.time or 0.0)
    before = min(echoes) - (root.time or 0.0)
    if before >= 0:
        who = f"rank {root.rank}" if root.rank is not None else "one process"
        text = (
            f"{who} failed first ({root.kind}), {before:.0f} s before the first timeout; the"
            " timeouts of the other ranks are its echo."
        )
        yield Finding("fail", "first-error", text, "R74")


CHECKS = (
    not_captured,
    eager_steps,
    draft_extend,
    accepted,
    definition,
    gates,
    loads,
    updates,
    troubles,
)
