"""Prometheus dumps of SGLang and vLLM, and acceptance computed from their counters.

Only counters: a gauge holds the last batch's value and says nothing about the time between.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from fastverify.errors import ConfigError

PREFIXES = ("sglang:", "vllm:", "process_start_time_seconds")
Order = Literal["given", "swapped"]


class Dump(msgspec.Struct, frozen=True):
    """Counters of one /metrics page, summed over labels; None: the page does not have it.

    verify_steps: per request, so that a batch of 4 counts 4 a step. accepted: draft tokens
    accepted, without the bonus token. positions: accepted drafts by position (vLLM).
    rate_gauge: SGLang's own rate of its last batch, kept to name its definition.
    """

    name: str
    engine: Literal["sglang", "vllm"]
    tokens: float | None = None
    requests: float | None = None
    verify_steps: float | None = None
    accepted: float | None = None
    drafted: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    graph_steps: float | None = None
    eager_steps: float | None = None
    running: float | None = None
    started: float | None = None
    positions: tuple[float, ...] = ()


class Acceptance(msgspec.Struct, frozen=True):
    """What happened between two dumps. length: tokens a verify step gave, bonus included.

    rate: accepted / drafted, None when the drafts are not counted and their number is not given.
    """

    order: Order
    verify_steps: float
    length: float
    rate: float | None
    positions: tuple[float, ...] = ()


_COUNTERS = (
    "tokens",
    "requests",
    "verify_steps",
    "accepted",
    "drafted",
    "prompt_tokens",
    "cached_tokens",
    "graph_steps",
    "eager_steps",
)
_NAMES = {
    "sglang": {
        "tokens": ("sglang:generation_tokens_total", ""),
        "requests": ("sglang:num_requests_total", ""),
        "verify_steps": ("sglang:spec_verify_calls_total", ""),
        "prompt_tokens": ("sglang:prompt_tokens_total", ""),
        "cached_tokens": ("sglang:cached_tokens_total", ""),
        "graph_steps": ("sglang:cuda_graph_passes_total", "decode_cuda_graph"),
        "eager_steps": ("sglang:cuda_graph_passes_total", "decode_none"),
        "running": ("sglang:num_running_reqs", ""),
    },
    "vllm": {
        "tokens": ("vllm:generation_tokens_total", ""),
        "requests": ("vllm:request_success_total", ""),
        "verify_steps": ("vllm:spec_decode_num_drafts_total", ""),
        "accepted": ("vllm:spec_decode_num_accepted_tokens_total", ""),
        "drafted": ("vllm:spec_decode_num_draft_tokens_total", ""),
        "prompt_tokens": ("vllm:prompt_tokens_total", ""),
        "cached_tokens": ("vllm:prefix_cache_hits_total", ""),
        "running": ("vllm:num_requests_running", ""),
    },
}
_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_RATE = "sglang:spec_accept_rate"


def parse_metrics(text: str, name: str) -> Dump:
    """Read one /metrics page of SGLang or vLLM; a cut-off last line is left out.

    Raises ConfigError when the page is neither's or cannot be read.
    """
    whole = text if text.endswith("\n") else text.rpartition("\n")[0]
    lines = [line.strip() for line in whole.split("\n")]
    kept = [line for line in lines if line.startswith(PREFIXES)]
    try:
        samples = [
            sample
            for family in text_string_to_metric_families("\n".join(kept) + "\n")
            for sample in family.samples
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{name} is not a whole /metrics page ({type(error).__name__}); record it again with"
            " `curl -s http://127.0.0.1:30000/metrics`."
        ) from None
    totals: dict[tuple[str, str], float] = {}
    for sample in samples:
        # A counter that is not a number says nothing, and would spoil every sum it enters.
        if math.isfinite(sample.value):
            key = (sample.name, sample.labels.get("mode") or sample.labels.get("position") or "")
            totals[key] = totals.get(key, 0.0) + sample.value
    engines = [e for e in ("sglang", "vllm") if any(n.startswith(f"{e}:") for n, _ in totals)]
    if not engines:
        raise ConfigError(
            f"{name} has neither sglang: nor vllm: metrics; start SGLang with --enable-metrics."
        )
    return _dump(totals, "sglang" if engines[0] == "sglang" else "vllm", name)


def _dump(
    totals: dict[tuple[str, str], float], engine: Literal["sglang", "vllm"], name: str
) -> Dump:
    values = {field: totals.get(key) for field, key in _NAMES[engine].items()}
    places = sorted((int(p), v) for (n, p), v in totals.items() if n == _POSITION and p.isdecimal())
    dump = Dump(
        name=name,
        engine=engine,
        started=totals.get(("process_start_time_seconds", "")),
        positions=tuple(value for _, value in places),
        **values,
    )
    if engine == "sglang" and dump.verify_steps is not None:
        # Prefill gives the first token of a request; each verify step its bonus and the accepted.
        if dump.tokens is None or dump.requests is None:
            return dump
        accepted = max(0.0, dump.tokens - dump.requests - dump.verify_steps)
        return msgspec.structs.replace(dump, accepted=accepted)
    return dump


def acceptance(first: Dump, second: Dump, drafts: int | None = None) -> Acceptance | str:
    """Accept length and rate between two dumps, or the clause that says why there are none.

    drafts: draft tokens a step, for a server that does not count them.
    """
    pair = ordered(first, second)
    if isinstance(pair, str):
        return pair
    before, after, order = pair
    steps, accepted = change(before, after, "verify_steps"), change(before, after, "accepted")
    if steps is None or accepted is None:
        return "no speculation counters are on both pages: no drafter, an old server, or a cut page"
    if steps <= 0:
        return "no verify step was counted between the two pages; SGLang counts finished requests"
    drafted = change(before, after, "drafted")
    drafted = drafted if drafted is not None else steps * drafts if drafts else None
    shares = [b - a for a, b in zip(before.positions, after.positions, strict=False)]
    return Acceptance(
        order,
        steps,
        1 + accepted / steps,
        accepted / drafted if drafted else None,
        tuple(share / steps for share in shares),
    )


def ordered(first: Dump, second: Dump) -> tuple[Dump, Dump, Order] | str:
    """The two dumps by age, or why they cannot be compared.

    All counters lower in the second page means swapped files, unless the server's start time says
    that it was started again; some up and some down can only be a restart.
    """
    if first.engine != second.engine:
        return f"one page is of {first.engine} and one of {second.engine}"
    if first.started is not None and second.started is not None and first.started != second.started:
        return "the server was restarted between the two pages, which set its counters to 0"
    moves = {change(first, second, field) for field in _COUNTERS} - {None, 0.0}
    if any(move < 0 for move in moves if move is not None):
        if any(move > 0 for move in moves if move is not None):
            return "some counters fell and some rose, so the server was restarted in between"
        if first.started is None:
            return "all counters fell, so the pages are swapped or the server was restarted"
        return second, first, "swapped"
    return first, second, "given"


def change(before: Dump, after: Dump, field: str) -> float | None:
    """Growth of one counter; a series that appeared in between started at 0."""
    old, new = getattr(before, field), getattr(after, field)
    if new is None:
        return None
    return float(new) - (float(old) if old is not None else 0.0)
