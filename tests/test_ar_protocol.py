"""The kernels' protocol between real processes, through the Triton interpreter on the CPU.

Whole calls are compared with the reference bit for bit (the norm within a bound), and ranks with
each other. The tests named "without" take one protection out and must then see wrong results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastverify.comm.launch import Algorithm, Launch
from fastverify.comm.layout import Layout
from tests.ar_reference import same_bits
from tests.spawn import RanksFailed, Server

ONE = Launch(Algorithm.ONE_SHOT, 1)
TWO = Launch(Algorithm.TWO_SHOT, 1)
TWO_PARTS = Launch(Algorithm.TWO_SHOT, 2)
ISLAND = Launch(Algorithm.ISLAND, 1)
ONE_SLOT, NO_CLEAR, KEEP_MARKS = 1, 2, 3
# More than a second in the interpreter, many times what a peer needs for its next call.
LONG_STALL = 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(("tests.ar_ranks", "fastverify.kernels.triton.ar_island"), TRITON_INTERPRET="1")
    yield made
    made.close()


def run(server: Server, world: int, plan: list[dict[str, Any]], hidden: int = 256) -> list[Any]:
    """Results by rank, then by call."""
    layout = Layout(world, hidden, 8)
    return server.run("tests.ar_ranks:rounds", world, layout, plan, limit_seconds=100)


def check(results: list[Any]) -> None:
    """Every call right on every rank, and equal bit for bit on all."""
    for number, calls in enumerate(zip(*results, strict=True)):
        for rank, call in enumerate(calls):
            assert not call["error"], f"call {number}: {call['error']}"
            assert not call["wrong"], f"call {number}, rank {rank}: {call['wrong']}"
            assert same_bits(call["out"], calls[0]["out"])


def troubles(results: list[Any]) -> list[str]:
    """All that went wrong, as text."""
    return [text for calls in results for call in calls for text in (call["wrong"], call["error"])
            if text]  # fmt: skip


def test_two_ranks_changing_shapes_and_algorithms(server: Server) -> None:
    """An odd number of calls, rows up and down, special rows, both types, with and without norm."""
    check(
        run(
            server,
            2,
            [
                {"launch": TWO, "rows": 5},
                {"launch": ONE, "rows": 5, "dtype": "fp16"},
                {"launch": ONE, "rows": 1},
                {"launch": TWO_PARTS, "rows": 3, "fused": False},
                {"launch": TWO, "rows": 1, "dtype": "fp16"},
                {"launch": ONE, "rows": 5, "fused": False},
                {"launch": TWO_PARTS, "rows": 2, "whole": True},
            ],
        )
    )


def test_four_ranks(server: Server) -> None:
    plan = [
        {"launch": TWO, "rows": 3},
        {"launch": ONE, "rows": 1, "fused": False},
        {"launch": TWO_PARTS, "rows": 1, "dtype": "fp16"},
    ]
    check(run(server, 4, plan, hidden=768))


def test_eight_ranks(server: Server) -> None:
    plan = [
        {"launch": ISLAND, "rows": 2},
        {"launch": TWO, "rows": 1},
        {"launch": ISLAND, "rows": 1, "fused": False, "whole": True},
    ]
    check(run(server, 8, plan))


@pytest.mark.parametrize("launch", [ONE, TWO], ids=lambda launch: launch.name)
def test_each_rank_late_in_turn(server: Server, launch: Launch) -> None:
    plan = [{"launch": launch, "rows": 1, "late": {rank: 0.3}} for rank in (0, 1, 1, 0)]
    check(run(server, 2, plan))


def test_blocks_of_a_rank_in_processes_of_their_own(server: Server) -> None:
    """Two ranks of two blocks: the parts of a row wait for each other, the counter is shared."""
    plan = [
        {"launch": Launch(Algorithm.ONE_SHOT, 2), "rows": 1},
        {"launch": TWO_PARTS, "rows": 2},
        {"launch": TWO_PARTS, "rows": 1, "fused": False},
    ]
    layout = Layout(2, 256, 8)
    results = server.run("tests.ar_ranks:block_rounds", 4, layout, plan, limit_seconds=60)
    assert results == [""] * 4


@pytest.mark.parametrize("fault", [0, ONE_SLOT], ids=["as built", "without the second slot"])
def test_fast_peer_during_a_stall(server: Server, fault: int) -> None:
    """Rank 0 stalls between its read and its clearing; rank 1 goes on to the next call."""
    plan = [
        {"launch": ONE, "rows": 1, "stall": {0: LONG_STALL}, "fault": fault},
        {"launch": ONE, "rows": 1, "fault": fault, "limit": 200 if fault else 4000},
    ]
    results = run(server, 2, plan)
    assert bool(troubles(results)) == bool(fault)


@pytest.mark.parametrize("fault", [0, NO_CLEAR], ids=["as built", "without clearing"])
def test_late_peer_and_what_it_sent_before(server: Server, fault: int) -> None:
    """Slots are used again two calls later, when the late peer has not written yet."""
    plan: list[dict[str, Any]] = [{"launch": TWO, "rows": 1, "fault": fault} for _ in range(3)]
    plan[2]["late"] = {1: 1.0}
    results = run(server, 2, plan)
    assert bool(troubles(results)) == bool(fault)


@pytest.mark.parametrize("fault", [0, KEEP_MARKS], ids=["as built", "without unmark"])
def test_payload_that_equals_the_mark(server: Server, fault: int) -> None:
    plan = [{"launch": ONE, "rows": 5, "fault": fault, "limit": 30 if fault else 4000}]
    results = run(server, 2, plan)
    assert bool(troubles(results)) == bool(fault)


@pytest.mark.parametrize(
    ("launch", "world", "absent"), [(ONE, 2, 1), (TWO, 4, 2), (ISLAND, 8, 6)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_absent_rank_is_named(server: Server, launch: Launch, world: int, absent: int) -> None:
    """Every wait ends; the others report, and further calls do not wait again."""
    plan = [{"launch": launch, "rows": 1, "limit": 15}]
    results = server.run(
        "tests.ar_ranks:absent", world, Layout(world, 256, 8), plan, absent, limit_seconds=90
    )
    errors = [result for rank, result in enumerate(results) if rank != absent]
    assert all(errors), "a rank did not notice"
    assert any(f"waited for rank {absent} in phase" in error for error in errors)


def test_a_rank_that_hangs_is_killed_and_named() -> None:
    """The tests' own guard: a bounded join."""
    made = Server(())
    try:
        with pytest.raises(RanksFailed, match="rank 1: did not finish in time"):
            made.run("tests.spawn:hang_rank_one", 2, limit_seconds=1.0)
    finally:
        made.close()
