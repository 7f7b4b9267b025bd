"""Acceptance from Prometheus counters, computed the same way for SGLang and vLLM.

Only counters: a gauge holds the last batch's value, and between two readings says nothing.
"""

from __future__ import annotations

import msgspec

from fastverify.errors import ConfigError

SGLANG_TOKENS = "sglang:generation_tokens_total"
SGLANG_REQUESTS = "sglang:num_requests_total"
SGLANG_VERIFY = "sglang:spec_verify_calls_total"
SGLANG_PASSES = "sglang:cuda_graph_passes_total"
VLLM_TOKENS = "vllm:generation_tokens_total"
VLLM_REQUESTS = "vllm:request_success_total"
VLLM_DRAFTS = "vllm:spec_decode_num_drafts_total"
VLLM_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Counters(msgspec.Struct, frozen=True):
    """Running totals of a server. verify_steps: per request, so a batch of 4 counts 4 a step.

    accepted: draft tokens accepted, without the bonus token. None: the server does not say.
    """

    server: str
    tokens: float
    requests: float
    verify_steps: float
    accepted: float
    drafted: float | None = None
    graph_steps: float | None = None
    eager_steps: float | None = None


class Acceptance(msgspec.Struct, frozen=True):
    """What happened between two readings. length: tokens a verify step gave, bonus included."""

    steps: float
    length: float | None
    rate: float | None
    eager_steps: float | None


def totals(text: str) -> dict[tuple[str, str], float]:
    """Sum of every sample in Prometheus text by (name, `mode` label)."""
    from prometheus_client.parser import text_string_to_metric_families

    out: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("mode", ""))
            out[key] = out.get(key, 0.0) + sample.value
    return out


def read_counters(text: str) -> Counters:
    """Counters of an SGLang or vLLM `/metrics` page; ConfigError when it is neither.

    SGLang counts the tokens and verify calls of finished requests. The first token of a request
    comes from prefill, the others from verify steps, one bonus token each plus the accepted.
    """
    found = totals(text)

    def value(name: str, mode: str = "") -> float:
        return found.get((name, mode), 0.0)

    if any(name.startswith("vllm:") for name, _ in found):
        return Counters(
            server="vllm",
            tokens=value(VLLM_TOKENS),
            requests=value(VLLM_REQUESTS),
            verify_steps=value(VLLM_DRAFTS),
            accepted=value(VLLM_ACCEPTED),
            drafted=value(VLLM_DRAFTED),
        )
    if not any(name.startswith("sglang:") for name, _ in found):
        raise ConfigError(
            "the server's /metrics page has neither sglang: nor vllm: counters: start SGLang with"
            " --enable-metrics."
        )
    steps = value(SGLANG_VERIFY)
    tokens, requests = value(SGLANG_TOKENS), value(SGLANG_REQUESTS)
    return Counters(
        server="sglang",
        tokens=tokens,
        requests=requests,
        verify_steps=steps,
        accepted=max(0.0, tokens - requests - steps),
        graph_steps=value(SGLANG_PASSES, "decode_cuda_graph"),
        eager_steps=value(SGLANG_PASSES, "decode_none"),
    )


def acceptance(before: Counters, after: Counters, drafts: int | None = None) -> Acceptance:
    """Accept length and rate between two readings; None where no verify step ran.

    drafts: draft tokens a step, for a server that does not count them.
    """
    steps = after.verify_steps - before.verify_steps
    eager = None
    if after.eager_steps is not None and before.eager_steps is not None:
        eager = after.eager_steps - before.eager_steps
    if steps <= 0:
        return Acceptance(0.0, None, None, eager)
    accepted = after.accepted - before.accepted
    drafted = None
    if after.drafted is not None and before.drafted is not None:
        drafted = after.drafted - before.drafted
    elif drafts:
        drafted = steps * drafts
    rate = accepted / drafted if drafted else None
    return Acceptance(steps, 1 + accepted / steps, rate, eager)
