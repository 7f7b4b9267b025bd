"""Acceptance from two /metrics pages: equal for both engines, and honest about bad pages."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify.doctor.diagnose import diagnose
from fastverify.doctor.evidence import Evidence
from fastverify.errors import ConfigError
from fastverify.logs.metrics import Acceptance, Dump, acceptance, parse_metrics
from fastverify.machine.finding import Finding
from tests.sentences import check_refused


def sglang(requests: float, steps: float, accepted: float, **more: float) -> str:
    lines = [
        f'sglang:generation_tokens_total{{is_streaming="true"}} {requests + steps + accepted}',
        f'sglang:num_requests_total{{is_streaming="true"}} {requests}',
        f"sglang:spec_verify_calls_total {steps}",
        "sglang:spec_accept_length 7.77",  # a gauge of the last batch, which must not matter
        *(f"{name} {value}" for name, value in more.items()),
    ]
    return "\n".join(lines) + "\n"


def vllm(steps: float, accepted: float, drafts: int = 3, **more: float) -> str:
    lines = [
        f"vllm:spec_decode_num_drafts_total {steps}",
        f"vllm:spec_decode_num_accepted_tokens_total {accepted}",
        f"vllm:spec_decode_num_draft_tokens_total {steps * drafts}",
        *(f"{name} {value}" for name, value in more.items()),
    ]
    return "\n".join(lines) + "\n"


def between(first: str, second: str, drafts: int | None = None) -> Acceptance | str:
    return acceptance(parse_metrics(first, "a"), parse_metrics(second, "b"), drafts)


def diagnosed(*pages: str) -> dict[str, Finding]:
    dumps = tuple(parse_metrics(page, "page") for page in pages)
    return {finding.code: finding for finding in diagnose(Evidence(dumps=dumps))}


@settings(deadline=None)
@given(
    st.integers(1, 10**6), st.integers(0, 3 * 10**6), st.integers(1, 10**4), st.integers(0, 10**6)
)
def test_both_engines_give_the_same_length_and_rate(
    steps: int, accepted: int, requests: int, before: int
) -> None:
    accepted = min(accepted, 3 * steps)
    ours = between(sglang(5, before, 2), sglang(5 + requests, before + steps, 2 + accepted), 3)
    theirs = between(vllm(before, 2), vllm(before + steps, 2 + accepted))
    assert isinstance(ours, Acceptance) and isinstance(theirs, Acceptance)
    assert math.isclose(ours.length, 1 + accepted / steps)
    assert math.isclose(ours.length, theirs.length)
    assert math.isclose(ours.rate or 0, theirs.rate or 0)


def test_pages_in_the_wrong_order_are_exchanged_when_the_start_time_proves_it() -> None:
    early = sglang(1, 10, 5, process_start_time_seconds=77)
    late = sglang(9, 110, 155, process_start_time_seconds=77)
    found = between(late, early)
    assert isinstance(found, Acceptance) and found.order == "swapped"
    assert math.isclose(found.length, 2.5)
    assert {"metrics-swapped", "acceptance"} <= set(diagnosed(late, early))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (sglang(9, 90, 80), sglang(1, 10, 5), "swapped or the server was restarted"),
        (
            sglang(9, 90, 80, process_start_time_seconds=1),
            sglang(1, 10, 5, process_start_time_seconds=2),
            "restarted",
        ),
        (sglang(9, 90, 80), sglang(10, 80, 95), "some counters fell and some rose"),
        (sglang(1, 10, 5), sglang(1, 10, 5), "no verify step"),
        (sglang(1, 10, 5), vllm(20, 5), "one page is of sglang"),
        (sglang(1, 10, 5), "sglang:num_requests_total 9\n", "no speculation counters"),
        (sglang(1, 10, 5), sglang(2, math.nan, 5), "no speculation counters"),
    ],
)
def test_pages_that_cannot_be_compared_say_why(first: str, second: str, says: str) -> None:
    found = between(first, second)
    assert isinstance(found, str) and says in found
    assert diagnosed(first, second)["acceptance-unknown"].severity == "unknown"


def test_nothing_accepted_is_an_alarm() -> None:
    assert "accept-zero" in diagnosed(vllm(10, 0), vllm(300, 0))
    assert "accept-zero" not in diagnosed(vllm(10, 0), vllm(300, 29))


def test_a_series_that_appears_later_started_at_zero() -> None:
    quiet = "sglang:num_requests_total 0\nsglang:generation_tokens_total 0\n"
    found = between(quiet, sglang(4, 100, 50))
    assert isinstance(found, Acceptance) and math.isclose(found.length, 1.5)


def test_one_page_counts_from_the_start() -> None:
    assert "since the server's start is 1.50" in diagnosed(vllm(100, 50))["acceptance"].text


def test_positions_are_shares_of_all_steps() -> None:
    page = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}} {}\n'
    first = vllm(0, 0) + page.format(0, 0) + page.format(1, 0)
    second = vllm(100, 130) + page.format(0, 85) + page.format(1, 45)
    found = between(first, second)
    assert isinstance(found, Acceptance) and found.positions == (0.85, 0.45)


def test_eager_passes_by_counter() -> None:
    modes = "".join(
        f'sglang:cuda_graph_passes_total{{{{mode="{mode}"}}}} {{}}\n'
        for mode in ("decode_cuda_graph", "decode_none")
    )
    found = diagnosed(
        sglang(1, 9, 9) + modes.format(10, 0), sglang(2, 99, 99) + modes.format(100, 10)
    )
    assert "10 of 100 decode passes" in found["eager-steps"].text
    quiet = diagnosed(
        sglang(1, 9, 9) + modes.format(10, 5), sglang(2, 99, 99) + modes.format(100, 5)
    )
    assert "eager-steps" not in quiet


def test_series_of_several_labels_are_summed() -> None:
    page = "".join(f'sglang:spec_verify_calls_total{{tp_rank="{r}"}} 5\n' for r in range(3))
    assert parse_metrics(page, "page").verify_steps == 15


def test_a_page_cut_in_a_line_loses_that_line_only() -> None:
    page = sglang(3, 30, 30)
    cut = page + "sglang:spec_accept_rate{model_na"
    assert parse_metrics(cut, "x") == parse_metrics(page, "x")


@pytest.mark.parametrize("text", ["", "\n", "node_cpu_seconds_total 3\n", "hello\n"])
def test_foreign_pages_are_refused(text: str) -> None:
    check_refused(parse_metrics, text, "page", says=("page", "metrics"))


@settings(deadline=None, max_examples=200)
@given(
    st.text(alphabet='sglangvm:_total{}="0.5e+NaIf #\n', max_size=200).map(lambda t: "sglang:" + t)
)
def test_odd_pages_raise_nothing_else(text: str) -> None:
    try:
        dump = parse_metrics(text, "page")
    except ConfigError:
        return
    assert isinstance(dump, Dump)
    acceptance(dump, dump)


def test_the_fixtures_of_report_112() -> None:
    folder = Path(__file__).parent / "data" / "reports"
    pages = [(folder / f"R112-{n}.prom").read_text() for n in (1, 2)]
    assert "prefix-cache-idle" in diagnosed(*pages)
    hit = 'sglang:cached_tokens_total{cache_source="device"} 512\n'
    assert "prefix-cache-idle" not in diagnosed(pages[0], pages[1] + hit)
