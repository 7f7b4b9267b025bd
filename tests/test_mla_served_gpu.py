"""Served greedy tokens with our verify kernel and with SGLang's, on a GPU: equal except at ties."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastverify import reports
from tests.engine import Server, drafter_flags

pytestmark = pytest.mark.gpu

STEMS = ("Where is the water in the river?", "The", "A small boat on the sea and")
# Contexts over one split and over many.
PROMPTS = [stem + " again and again" * times for stem in STEMS for times in (0, 40, 150)]
TOKENS = 64
# Two log-probabilities closer than bf16 logits can tell apart (8 bits of mantissa at about 16).
TIE = 0.13


SMALL = ("--max-total-tokens", "32768", "--mem-fraction-static", "0.2")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One after the other: a starting engine measures the memory that is free."""
    folder = tmp_path_factory.mktemp("served")
    ours, theirs = ({"FASTVERIFY_RUN_DIR": str(folder / name)} for name in ("ours", "theirs"))
    with Server(folder, *SMALL, *drafter_flags(), environment=ours) as first:
        first.wait_ready()
        flags = ("--fastverify-attention", "triton")
        with Server(folder, *SMALL, *drafter_flags(), *flags, environment=theirs) as second:
            yield {"ours": first, "theirs": second.wait_ready()}


def is_tie(server: Server, context: list[int], tokens: set[int]) -> bool:
    """Whether the two best next tokens are these two, too close to call."""
    body = {
        "input_ids": [context],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    best = server.post("/generate", body)[0]["meta_info"]["output_top_logprobs"][0]
    (first, one, *_), (second, two, *_) = best
    return {one, two} == tokens and first - second < TIE


def test_tokens_are_equal_except_at_proven_ties(servers: dict[str, Server]) -> None:
    ours = servers["ours"].generate(PROMPTS, TOKENS)
    theirs = servers["theirs"].generate(PROMPTS, TOKENS)
    ties = 0
    for prompt, one, two in zip(PROMPTS, ours, theirs, strict=True):
        a, b = one["output_ids"], two["output_ids"]
        if a == b:
            continue
        at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        start = servers["theirs"].post("/tokenize", {"model": "tiny", "prompt": prompt})["tokens"]
        assert is_tie(servers["theirs"], start + b[:at], {a[at], b[at]}), (prompt, at)
        ties += 1
    print(f"\n{len(PROMPTS)} prompts, {ties} ties")


def test_our_kernel_served_verify(servers: dict[str, Server]) -> None:
    run_dir = servers["ours"].log_path.parent / "ours"
    active = reports.read(run_dir, "active.json", reports.Active)
    assert active is not None and active.kernel is not None
    assert "verify" in active.kernel.split(" (")[0].split(", ")
    counts = reports.read(run_dir, "verify.json", reports.VerifyCounts)
    assert counts is not None and counts.eager_steps == 0 and counts.graph_steps > 0
