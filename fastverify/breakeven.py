"""When speculation pays: pure arithmetic over measured step times.

An iteration (draft, verify and host time) yields `accept length` tokens, a plain step yields one,
so speculation pays when the accept length exceeds iteration / plain step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from fastverify.errors import ConfigError

# Repeated runs of one server differ by about this much; a smaller difference is no verdict.
NOISE = 0.03
Answer = Literal["pays", "neutral", "loses"]


class Verdict(msgspec.Struct, frozen=True):
    """needed: the accept length at which both are equal. speedup: speculative / plain speed."""

    needed: float
    speedup: float
    answer: Answer


def needed_accept_length(iteration_ms: float, step_ms: float) -> float:
    """Accept length (bonus token included) at which an iteration earns what it costs.

    Raises ConfigError for times that are not positive numbers.
    """
    for what, value in (("an iteration", iteration_ms), ("a plain step", step_ms)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{what} is said to take {value} ms, but a time is a number above 0: measure it."
            )
    return iteration_ms / step_ms


def judge(iteration_ms: float, step_ms: float, accept_length: float) -> Verdict:
    """Does an accept length pay; within NOISE of break-even it is neutral.

    Raises ConfigError for an accept length below 1: every verify yields at least its bonus token.
    """
    needed = needed_accept_length(iteration_ms, step_ms)
    if not (math.isfinite(accept_length) and accept_length >= 1):
        raise ConfigError(
            f"the accept length is {accept_length}, but it counts the bonus token and is at least"
            " 1: give tokens a verify step, not the acceptance rate."
        )
    speedup = accept_length / needed
    if abs(speedup - 1) <= NOISE:
        return Verdict(needed, speedup, "neutral")
    return Verdict(needed, speedup, "pays" if speedup > 1 else "loses")


def fit_verify(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Least squares through (rows, ms): ms of one row and ms of each further row.

    None with fewer than two different row counts.
    """
    if len({rows for rows, _ in points}) < 2:
        return None
    mean_rows = sum(rows for rows, _ in points) / len(points)
    mean_ms = sum(ms for _, ms in points) / len(points)
    spread = sum((rows - mean_rows) ** 2 for rows, _ in points)
    slope = sum((rows - mean_rows) * (ms - mean_ms) for rows, ms in points) / spread
    return mean_ms + slope * (1 - mean_rows), slope


def best_length(accepted: Sequence[float], cost: Callable[[int], float]) -> int:
    """Drafts a step with the most tokens per cost, 0 when plain decode wins.

    accepted: the share of verify steps in which draft 1, 2, .. is accepted. These are cumulative
    (a later draft counts only behind all earlier ones), so each is the tokens its draft adds.
    cost: time of an iteration with so many drafts, of a plain step for 0, in any one unit.
    """
    speeds = [(1 + sum(accepted[:drafts])) / cost(drafts) for drafts in range(len(accepted) + 1)]
    return max(range(len(speeds)), key=lambda drafts: (speeds[drafts], -drafts))


def cutover(rows: Sequence[tuple[int, float, float]]) -> tuple[int | None, int | None]:
    """(largest batch at which speculation wins, next larger batch, at which it loses).

    rows: (batch, speculative tokens/s, plain tokens/s). None on a side that was not measured.
    """
    ordered = sorted(rows)
    wins = [batch for batch, speculative, plain in ordered if speculative > plain]
    last = max(wins, default=None)
    beyond = [batch for batch, _, _ in ordered if last is None or batch > last]
    return last, min(beyond, default=None)
