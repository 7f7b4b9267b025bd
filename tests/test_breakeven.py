"""Break-even arithmetic: the numbers of the design, of the reports, and its laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.breakeven import best_length, cutover, fit_verify, judge, needed_accept_length
from fastverify.doctor.pays import break_even_sentence
from tests.sentences import check_refused

TIMES = st.floats(0.01, 1e4)
RATES = (0.85, 0.67, 0.51, 0.36, 0.31)


def test_the_numbers_of_the_design() -> None:
    plain_ms, verify_ms = 12.2, 30.0
    iteration_ms = 1000 * 2.0 / 60  # 60 tok/s at accept length 2.0
    assert round(needed_accept_length(verify_ms, plain_ms), 2) == 2.46
    assert round(needed_accept_length(iteration_ms, plain_ms), 2) == 2.73
    verdict = judge(iteration_ms, plain_ms, 2.0)
    assert verdict.answer == "loses"
    assert round(verdict.speedup, 2) == 0.73
    assert "2.46" in break_even_sentence(verify_ms, plain_ms)


@pytest.mark.parametrize(
    ("iteration", "step", "length", "answer"),
    [
        (71, 47.6, 2.13, "pays"),
        (36.1, 16.4, 2.13, "loses"),
        (36.1, 16.4, 2.15, "neutral"),
        (2.33, 1.0, 2.3, "neutral"),
        (1.0, 1.0, 1.0, "neutral"),
    ],
)
def test_verdicts(iteration: float, step: float, length: float, answer: str) -> None:
    assert judge(iteration, step, length).answer == answer


@given(TIMES, TIMES, st.floats(1, 10))
def test_speedup_is_accept_length_over_break_even(a: float, b: float, length: float) -> None:
    verdict = judge(a, b, length)
    assert math.isclose(verdict.speedup * verdict.needed, length)
    assert math.isclose(
        judge(a, b, max(1.0, verdict.needed)).speedup, max(1.0, verdict.needed) / verdict.needed
    )


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_refused(time: float) -> None:
    check_refused(needed_accept_length, time, 1.0, says=("iteration",))
    check_refused(needed_accept_length, 1.0, time, says=("plain step",))


@pytest.mark.parametrize("length", [0.57, 0.0, -3, math.nan])
def test_a_rate_is_no_accept_length(length: float) -> None:
    check_refused(judge, 2.0, 1.0, length, says=("at least 1",))


def test_the_fit_of_report_8() -> None:
    one, slope = fit_verify([(1, 296), (2, 432), (3, 494), (6, 850)]) or (0, 0)
    assert math.isclose(slope, 109, rel_tol=0.01)
    assert math.isclose(one, 300, rel_tol=0.01)
    assert fit_verify([(2, 5.0), (2, 6.0)]) is None


@given(st.floats(0.1, 100), st.floats(0, 10), st.sets(st.integers(1, 64), min_size=2, max_size=8))
def test_the_fit_finds_a_line(base: float, slope: float, rows: set[int]) -> None:
    one, found = fit_verify([(n, base + slope * (n - 1)) for n in rows]) or (0, 0)
    assert math.isclose(one, base, rel_tol=1e-6, abs_tol=1e-6)
    assert math.isclose(found, slope, rel_tol=1e-6, abs_tol=1e-6)


def test_draft_lengths_of_report_103() -> None:
    assert best_length(RATES, lambda k: 1 + 0.30 * k) == 3
    assert best_length(RATES, lambda k: 1 + 0.12 * k) == 5
    speeds = [(1 + sum(RATES[:k])) / (1 + 0.12 * k) for k in range(1, 6)]
    assert [round(s, 2) for s in speeds] == [1.65, 2.03, 2.23, 2.29, 2.31]


@given(st.lists(st.floats(0, 1), max_size=7), st.floats(0.5, 3), st.floats(0, 2))
def test_no_other_length_is_faster(rates: list[float], base: float, slope: float) -> None:
    def cost(k: int) -> float:
        return base + slope * k if k else 1.0

    best = best_length(rates, cost)
    fastest = max((1 + sum(rates[:k])) / cost(k) for k in range(len(rates) + 1))
    assert math.isclose((1 + sum(rates[:best])) / cost(best), fastest)


def test_cutover_does_not_depend_on_order() -> None:
    rows = [(1, 112.5, 91.5), (32, 1104.0, 859.0), (128, 2044.0, 2165.0)]
    assert cutover(rows) == cutover(rows[::-1]) == (32, 128)
    assert cutover(rows[:2]) == (32, None)
    assert cutover([(1, 1.0, 2.0)]) == (None, 1)
    assert cutover([]) == (None, None)
