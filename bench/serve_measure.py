"""Serve one prompt set at one batch size and say what it cost; the server may be anywhere."""

from __future__ import annotations

import statistics
from typing import Protocol

import msgspec

from bench.serve_client import Generation, Prompt
from bench.serve_counters import Counters, acceptance


class Server(Protocol):
    """What the bench needs of a server."""

    def generate(self, prompts: list[Prompt], tokens: int) -> Generation: ...

    def counters(self) -> Counters: ...

    def close(self) -> None: ...


class Served(msgspec.Struct, frozen=True):
    """One measured cell. drafts 0 is no speculation, None is whatever a remote server does.

    tok_s: tokens per second of decoding over all requests. iteration_ms: time of one verify step,
    or of one decode step without speculation. simulated: the accept length was imposed.
    """

    context: int
    batch: int
    drafts: int | None
    tok_s: float
    iteration_ms: float
    accept_length: float
    accept_rate: float | None
    eager_steps: float | None
    simulated: float | None
    prompts: str
    tok_s_samples: list[float] = []


def decode_tok_s(whole: Generation, first: Generation, batch: int) -> float:
    """Decoding speed from a long generation and one of a single token, equal prefill in both."""
    return (whole.tokens - batch) / max(whole.seconds - first.seconds, 1e-9)


def measure(
    server: Server,
    prompts: list[Prompt],
    *,
    tokens: int,
    repeats: int,
    drafts: int | None,
    simulated: float | None,
    label: str,
) -> Served:
    """Serve prompts together. The prompt is cached first, so that every run has equal prefill."""
    batch = len(prompts)
    server.generate(prompts, 2)
    firsts = [server.generate(prompts, 1) for _ in range(repeats)]
    first = min(firsts, key=lambda one: one.seconds)
    before = server.counters()
    wholes = [server.generate(prompts, tokens) for _ in range(repeats)]
    seen = acceptance(before, server.counters(), drafts)
    speeds = [decode_tok_s(whole, first, batch) for whole in wholes]
    tok_s = statistics.median(speeds)
    length = seen.length or 1.0
    return Served(
        context=first.prompt_tokens,
        batch=batch,
        drafts=drafts,
        tok_s=tok_s,
        iteration_ms=1000 * length * batch / tok_s,
        accept_length=length,
        accept_rate=seen.rate,
        eager_steps=seen.eager_steps,
        simulated=simulated,
        prompts=label,
        tok_s_samples=[round(speed, 2) for speed in speeds],
    )


def summary(cells: list[Served]) -> dict[str, float]:
    """Flat names and numbers for the result file; accept is the imposed length, or the seen."""
    out: dict[str, float] = {}
    for cell in cells:
        accept = cell.accept_length if cell.simulated is None else cell.simulated
        drafts = "Auto" if cell.drafts is None else cell.drafts
        where = f"ctx{cell.context}.batch{cell.batch}.draft{drafts}.accept{accept:.3g}"
        out[f"tok_s.{where}"] = round(cell.tok_s, 2)
        out[f"iteration_ms.{where}"] = round(cell.iteration_ms, 3)
        out[f"accept_length.{where}"] = round(cell.accept_length, 3)
        if cell.eager_steps is not None:
            out[f"eager_steps.{where}"] = cell.eager_steps
    return out
