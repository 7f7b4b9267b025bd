"""Scenarios of tests/test_ar_streams_gpu.py; each runs in a process of its own, on one GPU."""

from __future__ import annotations

import ctypes
import faulthandler
from typing import Any

import torch

from fastverify.comm import launch as ar
from fastverify.comm import local
from fastverify.comm.layout import Layout
from fastverify.comm.workspace import PeerError
from tests import ar_reference as reference
from tests.spawn import Rank

local.allow_many_streams()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Ends a wait after some milliseconds where a test wants a wait to end.
SHORT_LIMIT = 10_000


class Case:
    """One call of all ranks: inputs, outputs and what must come out."""

    def __init__(
        self, layout: Layout, launch: ar.Launch, rows: int, *, dtype: str = "bf16",
        fused: bool = True, whole: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.launch, self.rows, self.dtype, self.whole = launch, rows, DTYPES[dtype], whole
        self.layout = layout
        shape = (layout.world, rows, layout.hidden)
        self.x = torch.empty(shape, dtype=self.dtype, device="cuda")
        self.residual = torch.empty(shape[1:], dtype=self.dtype, device="cuda")
        self.weight = torch.empty(shape[2:], dtype=self.dtype, device="cuda")
        self.out = torch.full_like(self.x, 7)
        self.residual_out = torch.full_like(self.x, 7)
        self.fused = fused
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """New inputs in the same memory, and the outputs they must give."""
        make = reference.whole_inputs if self.whole else reference.real_inputs
        layout = self.layout
        inputs = make(layout.world, self.rows, layout.hidden, self.dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        residual = torch.randn(self.rows, layout.hidden, generator=generator).to(self.dtype)
        weight = torch.rand(layout.hidden, generator=generator).to(self.dtype) + 0.5
        self.x.copy_(torch.stack(inputs))
        self.residual.copy_(residual)
        self.weight.copy_(weight)
        island = self.launch.algorithm is ar.Algorithm.ISLAND
        total = reference.total_by_island(inputs) if island else reference.total(inputs)
        self.wanted = reference.new_residual(total, residual) if self.fused else total
        self.normed = reference.norm(self.wanted, weight)
        self.sent = torch.stack(inputs)

    def tensors(self, rank: int) -> ar.Tensors:
        if not self.fused:
            return ar.Tensors(self.x[rank], self.out[rank])
        return ar.Tensors(
            self.x[rank], self.out[rank], self.residual, self.weight, self.residual_out[rank]
        )

    def wrong(self) -> str:
        """What is wrong with the outputs, or an empty string. Resets them."""
        out, residual_out = (t.to("cpu", copy=True) for t in (self.out, self.residual_out))
        self.out.fill_(7)
        self.residual_out.fill_(7)
        found = []
        for rank in range(self.layout.world):
            exact = residual_out[rank] if self.fused else out[rank]
            if not reference.same_bits(exact, self.wanted):
                found.append(f"rank {rank}: {reference.first_difference(exact, self.wanted)}")
            if not reference.same_bits(out[rank], out[0]):
                found.append(f"rank {rank} is not equal to rank 0")
        if self.fused:
            good = torch.isclose(out[0].double(), self.normed, rtol=8e-3, atol=8e-3, equal_nan=True)
            if not good.all():
                found.append(f"norm: {int((~good).sum())} values are off")
        if not reference.same_bits(self.x.cpu(), self.sent):
            found.append("an input was changed")
        text = "; ".join(found)
        return f"{self.launch.name}, {self.rows} rows: {text}" if text else ""


def _set_up(
    world: int, hidden: int, plan: list[dict[str, Any]]
) -> tuple[local.LocalRanks, list[Case]]:
    faulthandler.dump_traceback_later(60, exit=True)
    layout = Layout(world, hidden, max(call["rows"] for call in plan))
    ranks = local.LocalRanks(layout)
    cases = [Case(layout, seed=seed, **call) for seed, call in enumerate(plan)]
    for case in cases:
        ranks.load(case.launch, case.tensors(0))
    return ranks, cases


def _run(ranks: local.LocalRanks, case: Case, **options: Any) -> None:
    def body(rank: int) -> None:
        ranks.call(rank, case.launch, case.tensors(rank), eps=reference.EPS, **options)

    ranks.together(body)


def correct(_: Rank, world: int, hidden: int, plan: list[dict[str, Any]]) -> list[str]:
    """Each case once, one after the other in one workspace; returns what is wrong."""
    ranks, cases = _set_up(world, hidden, plan)
    for case in cases:
        _run(ranks, case)
    ranks.check()
    return [text for case in cases if (text := case.wrong())]


def graphs(
    _: Rank, world: int, hidden: int, plan: list[dict[str, Any]], calls: int, replays: int
) -> list[str]:
    """One graph a rank of `calls` calls that cycle over the cases, inputs changed in between."""
    ranks, cases = _set_up(world, hidden, plan)
    order = [cases[i % len(cases)] for i in range(calls)]

    def body(rank: int) -> None:
        for case in order:
            ranks.call(rank, case.launch, case.tensors(rank), eps=reference.EPS)

    captured = ranks.capture(body)
    wrong = []
    for replay in range(replays):
        for number, case in enumerate(cases):
            case.fill(100 * replay + number)
        ranks.together(lambda rank: captured[rank].replay())
        ranks.check()
        wrong += [f"replay {replay}: {text}" for case in cases if (text := case.wrong())]
    counted = {workspace.calls() for workspace in ranks.workspaces}
    if counted != {calls * replays}:
        wrong.append(f"the ranks counted {counted} calls, not {calls * replays}")
    return wrong


def nodes(_: Rank, world: int, plan: list[dict[str, Any]]) -> int:
    """Nodes of a graph that holds one call of each case on rank 0."""
    ranks, cases = _set_up(world, 7168, plan)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=ranks.streams[0]):
        for case in cases:
            ranks.call(0, case.launch, case.tensors(0))
    count = ctypes.c_size_t()
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    assert runtime.cudaGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    return count.value


def late(_: Rank, world: int, plan: list[dict[str, Any]]) -> list[str]:
    """Each rank in turn starts its call about a millisecond after the others."""
    ranks, (case,) = _set_up(world, 7168, plan)
    wrong = []
    for late_rank in range(world):

        def body(rank: int, late_rank: int = late_rank) -> None:
            if rank == late_rank:
                torch.cuda._sleep(2_000_000)
            ranks.call(rank, case.launch, case.tensors(rank), eps=reference.EPS)

        ranks.together(body)
        ranks.check()
        wrong.append(case.wrong())
    return [text for text in wrong if text]


def race(
    _: Rank, plan: list[dict[str, Any]], fault: int, stall: int, late_call: int | None
) -> list[str]:
    """All cases back to back on two ranks. Rank 0 stalls in the first call, between its read and
    its clearing; rank 1 is late in `late_call`. Returns what is wrong, errors included."""
    ranks, cases = _set_up(2, 7168, plan)
    for case in cases:
        for polls in {0, stall}:
            ranks.load(case.launch, case.tensors(0), fault=fault, stall=polls)

    def body(rank: int) -> None:
        for number, case in enumerate(cases):
            if rank == 1 and number == late_call:
                torch.cuda._sleep(2_000_000)
            ranks.call(
                rank, case.launch, case.tensors(rank), eps=reference.EPS, limit=SHORT_LIMIT,
                fault=fault, stall=stall if rank == 0 and number == 0 else 0,
            )  # fmt: skip

    ranks.together(body)
    wrong = [text for case in cases if (text := case.wrong())]
    try:
        ranks.check()
    except PeerError as error:
        wrong.append(str(error))
    return wrong


def absent(_: Rank, world: int, plan: list[dict[str, Any]], who: int) -> tuple[str, list[str]]:
    """All ranks but one call. Returns the error, and what is wrong after clearing."""
    ranks, (case,) = _set_up(world, 7168, plan)

    def body(rank: int) -> None:
        for _ in range(50 if rank != who else 0):
            ranks.call(rank, case.launch, case.tensors(rank), limit=SHORT_LIMIT)

    ranks.together(body)
    error = ""
    try:
        ranks.check()
    except PeerError as raised:
        error = str(raised)
    ranks.clear()
    case.wrong()
    _run(ranks, case)
    ranks.check()
    return error, [text for text in [case.wrong()] if text]
