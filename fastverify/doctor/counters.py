"""What two /metrics pages show: acceptance from counters, eager steps, an idle prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.doctor.evidence import Evidence
from fastverify.doctor.servers import DEAD
from fastverify.logs.metrics import Dump, acceptance, change, ordered
from fastverify.machine.finding import Finding

_MANY_REQUESTS = 10


def accepted(evidence: Evidence) -> Iterator[Finding]:
    """Accept length over the time between the pages, or since start for a single one."""
    pair = _pair(evidence)
    if pair is None:
        return
    found = acceptance(*pair, evidence.draft_length)
    if isinstance(found, str):
        text = f"acceptance cannot be computed: {found}; record two pages of one run."
        yield Finding("unknown", "acceptance-unknown", text, "R104")
        return
    if found.order == "swapped":
        text = "the first /metrics page is the later one; the two were exchanged before computing."
        yield Finding("info", "metrics-swapped", text, "R104")
    since = "since the server's start" if len(evidence.dumps) == 1 else "between the two pages"
    rate = f", {found.rate:.0%} of the drafts" if found.rate is not None else ""
    if found.length <= DEAD:
        text = (
            f"not one draft was accepted in {found.verify_steps:.0f} verify steps {since}: the"
            " drafter is dead or a collective returns wrong data; check it with `fastverify doctor"
            " --model TARGET --draft DRAFTER`."
        )
        yield Finding("fail", "accept-zero", text, "R43, R77")
        return
    text = (
        f"the accept length {since} is {found.length:.2f} tokens a verify step, bonus token"
        f" included{rate}, over {found.verify_steps:.0f} verify steps."
    )
    yield Finding("info", "acceptance", text, "R104")


def eager(evidence: Evidence) -> Iterator[Finding]:
    """Decode passes without a graph, by SGLang's own counter."""
    pair = _pair(evidence)
    pages = ordered(*pair) if pair else ""
    if isinstance(pages, str):
        return
    before, after, _ = pages
    missed, replayed = change(before, after, "eager_steps"), change(before, after, "graph_steps")
    if missed:
        total = missed + (replayed or 0)
        text = (
            f"{missed:.0f} of {total:.0f} decode passes ran without a graph; look for the batch"
            " size in the server's log and capture it with --cuda-graph-bs-decode."
        )
        yield Finding("warn", "eager-steps", text, "R13")


def prefix_cache(evidence: Evidence) -> Iterator[Finding]:
    """A prefix cache that never hits while a drafter runs."""
    pair = _pair(evidence)
    pages = ordered(*pair) if pair else ""
    if isinstance(pages, str):
        return
    before, after, _ = pages
    requests, prompts = change(before, after, "requests"), change(before, after, "prompt_tokens")
    speculates = (change(before, after, "verify_steps") or 0) > 0
    hits = change(before, after, "cached_tokens") or 0
    if speculates and prompts and (requests or 0) >= _MANY_REQUESTS and hits == 0:
        text = (
            f"none of {prompts:.0f} prompt tokens of {requests:.0f} requests came from the prefix"
            " cache; if prompts were repeated, compare with a server without drafts."
        )
        yield Finding("warn", "prefix-cache-idle", text, "R112")


def _pair(evidence: Evidence) -> tuple[Dump, Dump] | None:
    if not evidence.dumps:
        return None
    if len(evidence.dumps) > 1:
        return evidence.dumps[0], evidence.dumps[-1]
    only = evidence.dumps[0]
    # A server's counters begin at 0.
    start = Dump("start", only.engine, positions=tuple(0.0 for _ in only.positions))
    return start, only


CHECKS = (accepted, eager, prefix_cache)
