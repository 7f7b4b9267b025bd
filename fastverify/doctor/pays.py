"""Does speculation pay: break-even from measured times, by batch, context and draft length."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.breakeven import best_length, cutover, fit_verify, judge, needed_accept_length
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.measured import Step, VerifyCost
from fastverify.doctor.servers import DEAD
from fastverify.errors import ConfigError
from fastverify.logs.metrics import Dump, acceptance
from fastverify.machine.finding import Finding

_GROWTH = 1.5


def given(evidence: Evidence) -> Iterator[Finding]:
    """The accept length the user gave or the logs show, against times the user gave."""
    length = evidence.accept_length
    if length is None:
        length = _seen(evidence) if evidence.step_ms else None
    if length is None:
        return
    if evidence.step_ms is None or evidence.iteration_ms is None:
        text = (
            f"whether accept length {length:g} pays is unknown without step times; give --step-ms"
            " (plain decode) and --iteration-ms (draft, verify and host), both measured here."
        )
        yield Finding("unknown", "pays-unknown", text, "R01")
        return
    step = Step(round_ms=evidence.iteration_ms, decode_ms=evidence.step_ms, accept_length=length)
    yield from _judged(step)


def _seen(evidence: Evidence) -> float | None:
    """An accept length from counters, else from log lines."""
    if evidence.dumps:
        last = evidence.dumps[-1]
        before = evidence.dumps[0] if len(evidence.dumps) > 1 else Dump("start", last.engine)
        found = acceptance(before, last)
        return None if isinstance(found, str) else found.length
    lengths = [d.accept_length for log in evidence.servers for d in log.decodes if d.accept_length]
    return sum(lengths) / len(lengths) if lengths and max(lengths) > DEAD else None


def steps(evidence: Evidence) -> Iterator[Finding]:
    """Each measured step against break-even."""
    for step in evidence.measured.steps:
        if step.accept_length is not None:
            yield from _judged(step)
    yield from _scaffolding(evidence.measured.steps)
    yield from _contexts(evidence.measured.steps)


def _judged(step: Step) -> Iterator[Finding]:
    times = _times(step)
    if times is None or step.accept_length is None:
        return
    try:
        verdict = judge(times[1], times[0], step.accept_length)
    except ConfigError as error:
        yield Finding("unknown", "pays-unknown", str(error), "R01")
        return
    name = f"{step.name}: " if step.name else ""
    clock = f"an iteration takes {times[1]:g} ms and a plain step {times[0]:g}"
    if step.ratio is not None:
        clock = f"an iteration takes {step.ratio:g} plain steps"
    facts = f"{clock}, so accept length {verdict.needed:.2f} is needed"
    facts += f" and {step.accept_length:.2f} is reached"
    if verdict.answer == "pays":
        text = f"{name}speculation pays, x{verdict.speedup:.2f}: {facts}."
        yield Finding("info", "speculation-pays", text, "R01")
    elif verdict.answer == "neutral":
        text = (
            f"{name}speculation is neutral, x{verdict.speedup:.2f}: {facts}; a cheaper verify"
            " helps."
        )
        yield Finding("info", "speculation-neutral", text, "R09")
    else:
        text = (
            f"{name}speculation does not pay, x{verdict.speedup:.2f}: {facts}; capture verify,"
            " draft fewer tokens, or serve without --draft."
        )
        yield Finding("warn", "speculation-loses", text, "R01, R07")


def _times(step: Step) -> tuple[float, float] | None:
    if step.ratio is not None:
        return 1.0, step.ratio
    if step.decode_ms is None or step.round_ms is None:
        return None
    return step.decode_ms, step.round_ms


def _scaffolding(measured: tuple[Step, ...]) -> Iterator[Finding]:
    """Steps with no drafts under a speculating server against a server without."""
    idle = [s.round_ms or s.decode_ms for s in measured if s.drafts == 0 and s.speculating]
    plain = [s.decode_ms or s.round_ms for s in measured if s.speculating is False]
    if idle and plain and idle[0] and plain[0] and idle[0] > plain[0]:
        text = (
            f"a step without drafts takes {idle[0]:g} ms in a speculating server and {plain[0]:g}"
            f" ms in one without: {idle[0] - plain[0]:g} ms of scaffolding, so compare with a"
            " server that does not speculate at all."
        )
        yield Finding("warn", "scaffolding-cost", text, "R05")


def _contexts(measured: tuple[Step, ...]) -> Iterator[Finding]:
    """Iterations that grow with the context while plain steps do not."""
    points = sorted(
        (s.context, s.round_ms, s.decode_ms)
        for s in measured
        if s.context is not None and s.round_ms is not None and s.decode_ms is not None
    )
    if len(points) < 2:
        return
    (short, round_a, plain_a), (long, round_b, plain_b) = points[0], points[-1]
    if round_b / round_a > _GROWTH * plain_b / plain_a:
        text = (
            f"from {short} to {long} tokens of context an iteration grows x{round_b / round_a:.1f}"
            f" and a plain step x{plain_b / plain_a:.1f}: verify attention reads the context"
            " slowly; use --fastverify-attention fastverify or stop drafting beyond the shorter"
            " one."
        )
        yield Finding("warn", "verify-context", text, "R10")


def throughput(evidence: Evidence) -> Iterator[Finding]:
    """Up to how many requests speculation wins, at each context."""
    rows = evidence.measured.throughput
    for context in sorted({row.context for row in rows}):
        here = [(r.requests, r.speculative, r.plain) for r in rows if r.context == context]
        last, beyond = cutover(here)
        if last is None:
            text = f"at {context} tokens of context speculation loses at every measured load."
        elif beyond is None:
            text = (
                f"at {context} tokens of context speculation wins up to {last} requests and more."
            )
        else:
            text = (
                f"at {context} tokens of context speculation wins up to {last} requests and loses"
                f" at {beyond}; stop drafting in between."
            )
        yield Finding("warn" if last is None else "info", "cutover", text, "R03")


def free_rows(evidence: Evidence) -> Iterator[Finding]:
    """The batch at which the rows of verify stop being free."""
    rows, drafts = evidence.measured.free_rows, evidence.measured.drafts
    if rows is None or drafts is None:
        return
    batch = rows // (drafts + 1)
    text = (
        f"{rows} rows cost no more than one on this machine, so {drafts} drafts are free up to"
        f" batch {batch}; expect less from speculation beyond."
    )
    yield Finding("info", "speculation-max-batch", text, "R06")


def verify_cost(evidence: Evidence) -> Iterator[Finding]:
    """The cost of one more verified row, and the draft length it suggests by prompt class."""
    cost = evidence.measured.verify_cost
    line = fit_verify(cost.points) if cost else None
    if cost is None or line is None:
        return
    one, slope = line
    text = (
        f"verify takes {one:.4g} ms for one row and {slope:.4g} ms for each further one, against"
        f" {cost.step_ms:g} ms of a plain step."
    )
    yield Finding("info", "verify-slope", text, "R08")
    for name, accepted in cost.accepted.items():
        best = best_length(accepted, lambda drafts: _iteration(cost, one, slope, drafts))
        advice = f"{best} drafts a step are best" if best else "drafts do not pay"
        yield Finding("info", "draft-length", f"for {name} prompts {advice}.", "R08")


def _iteration(cost: VerifyCost, one: float, slope: float, drafts: int) -> float:
    return cost.step_ms if drafts == 0 else cost.draft_ms + max(0.0, one + slope * drafts)


def positions(evidence: Evidence) -> Iterator[Finding]:
    """The draft length with the most tokens per cost."""
    given_rates = evidence.measured.positions
    if given_rates is None:
        return
    accepted, base, slope = given_rates.accepted, given_rates.base, given_rates.slope
    best = best_length(accepted, lambda drafts: base + slope * drafts if drafts else 1.0)
    tokens = 1 + sum(accepted[:best])
    text = (
        f"{best} drafts a step give the most, {tokens:.2f} tokens for {base + slope * best:.2f}"
        " plain steps; rates by position are cumulative and must not be multiplied."
    )
    yield Finding("info", "draft-length", text, "R103")


def baselines(evidence: Evidence) -> Iterator[Finding]:
    """Speed-ups over baselines that differ."""
    results = evidence.measured.results
    speeds = [r.baseline for r in results]
    if len(results) > 1 and max(speeds) > 1.2 * min(speeds):
        parts = " and ".join(
            f"{r.name} x{r.speculative / r.baseline:.1f} over {r.baseline:g} tok/s" for r in results
        )
        text = f"{parts} are not comparable; compare tokens per second or step times."
        yield Finding("warn", "ratio-baselines", text, "R11")


def launches(evidence: Evidence) -> Iterator[Finding]:
    """What capture would save at most: launches times host time."""
    counts = evidence.measured.launches
    if counts is None:
        return
    saved = counts[0] * counts[1] / 1000
    text = (
        f"{counts[0]} eager launches at {counts[1]:g} us cost {saved:.1f} ms an iteration; a graph"
        " saves about that much."
    )
    yield Finding("info", "eager-launches", text, "R16")


def break_even_sentence(iteration_ms: float, step_ms: float) -> str:
    """One clause for plans and tables: the accept length that is needed (ConfigError)."""
    needed = needed_accept_length(iteration_ms, step_ms)
    return f"needs accept length {needed:.2f} ({iteration_ms:g} ms / {step_ms:g} ms)"


CHECKS = (
    given,
    steps,
    throughput,
    free_rows,
    verify_cost,
    positions,
    baselines,
    launches,
)
