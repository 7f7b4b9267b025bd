"""Measuring the contenders on the machine itself, and agreeing on one table over all ranks."""

from __future__ import annotations

import datetime
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fastverify.comm.agreement import agree, require_same
from fastverify.comm.choice import (
    Measured,
    Table,
    choose,
    covers,
    load_table,
    save_table,
)
from fastverify.comm.collective import Call, Collective
from fastverify.comm.reference import add_norm
from fastverify.comm.workspace import PeerError

CALLS_PER_GRAPH = 122
REPLAYS = 20
CHECKS = 4
EPS = 1e-6
Progress = Callable[[int, int, str], None]


def tune(
    contenders: Sequence[Collective],
    calls: Sequence[Call],
    group: dist.ProcessGroup,
    *,
    key: str,
    cache: pathlib.Path | None = None,
    forced: str | None = None,
    again: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Table:
    """The table for these calls, from the cache or measured. Collective, before capture.

    group: a CPU group. again: measure although the cache has a table. The cache is used only if
    every rank can use it. Raises PeerError on all ranks when they were started differently.
    """
    names = [contender.name for contender in contenders]
    require_same(group, (key, names, list(calls), forced), "plans of collectives")
    cached = None if cache is None or again or forced else load_table(cache, key)
    usable = cached is not None and covers(cached, calls, names)
    if all(agree(group, lambda: usable, "read the table of collectives")):
        tables = agree(group, lambda: cached, "compare tables")
        if all(table == tables[0] for table in tables):
            assert cached is not None
            return cached
    measured: list[Measured] = []
    total = len(calls) * len(contenders)
    for call in calls:
        for contender in contenders:
            progress(len(measured), total, f"{contender.name}, {call}")
            measured.append(measure(contender, call, group))
    progress(total, total, "done")
    # Every rank computed this from the same gathered numbers.
    date = agree(group, lambda: datetime.date.today().isoformat(), "date the table")[0]
    command = agree(group, lambda: shlex.join(sys.argv), "name the command")[0]
    table = Table(key, choose(measured, forced), date, command)
    require_same(group, table, "tables of collectives")
    if cache is not None and forced is None and dist.get_rank(group) == 0:
        save_table(cache, table)
    return table


def measure(contender: Collective, call: Call, group: dist.ProcessGroup) -> Measured:
    """Verify one contender under graph replay with changing data, then time it. Collective."""
    reason = contender.why_not(call)
    if reason is not None:
        contender.prepare([call])
        reason = contender.why_not(call)
    if any(agree(group, lambda: reason, "ask a backend")):
        return Measured(contender.name, call, None, reason or "another rank declines")
    contender.prepare([call])
    problem = _Problem(call, group)
    graph = _capture(contender, problem)
    wrong = ""
    for seed in range(CHECKS):
        problem.fill(seed)
        torch.cuda.synchronize()
        dist.barrier(group)
        graph.replay()
        torch.cuda.synchronize()
        try:
            contender.check()
        except PeerError as error:
            # Raised together with the others below: they wait there for this rank.
            wrong = wrong or str(error)
        wrong = wrong or problem.wrong()
    verdicts = agree(group, lambda: wrong, "verify a backend")
    if any(verdicts):
        return Measured(contender.name, call, None, f"wrong result: {next(filter(None, verdicts))}")
    samples = agree(group, lambda: _samples(graph, group), f"time {contender.name}")
    slowest = [max(ranks) for ranks in zip(*samples, strict=True)]
    return Measured(contender.name, call, round(statistics.median(slowest), 3))


def _capture(contender: Collective, problem: _Problem) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.run(contender)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS_PER_GRAPH):
            problem.run(contender)
    return graph


def _samples(graph: torch.cuda.CUDAGraph, group: dist.ProcessGroup) -> list[float]:
    taken = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier(group)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1000.0 / CALLS_PER_GRAPH)
    return taken


class _Problem:
    """Whole numbers, different on each rank, whose sums are exact in every order."""

    def __init__(self, call: Call, group: dist.ProcessGroup) -> None:
        self._call = call
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        dtype = getattr(torch, call.dtype)
        self._x = torch.empty(call.rows, call.hidden, dtype=dtype, device="cuda")
        self._residual = torch.empty_like(self._x)
        self._weight = torch.linspace(0.5, 1.5, call.hidden, device="cuda").to(dtype)
        self._out: tuple[torch.Tensor, ...] = ()
        self.fill(0)

    def fill(self, seed: int) -> None:
        """New inputs in place, and what they must give."""
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (self._world + 1, *self._x.shape)
        values = torch.randint(-8, 8, shape, generator=generator, device="cuda")
        self._x.copy_(values[self._rank])
        self._residual.copy_(values[-1])
        self._total = values[:-1].sum(0).to(self._x.dtype)

    def run(self, contender: Collective) -> None:
        """One call; the outputs of the last one are kept."""
        if self._call.fused:
            fused = contender.all_reduce_residual_rmsnorm(
                self._x, self._residual, self._weight, EPS
            )
            self._out = fused or ()
        else:
            total = contender.all_reduce(self._x)
            self._out = () if total is None else (total,)

    def wrong(self) -> str:
        """What is wrong with the outputs, or an empty string."""
        if not self._out:
            return "declined after all"
        if not self._call.fused:
            return "" if torch.equal(self._out[0], self._total) else "sum"
        norm, new = add_norm(self._total, self._residual, self._weight, EPS)
        if not torch.equal(self._out[1], new):
            return "residual"
        near = torch.allclose(self._out[0].float(), norm.float(), rtol=1.6e-2, atol=1.6e-2)
        return "" if near else "norm"
