"""Our all-reduce kernels on one GPU: every rank a stream, every test a process with a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastverify.comm.launch import Algorithm, Launch
from tests.spawn import Server

pytestmark = pytest.mark.gpu

HIDDEN = 7168
ONE = Launch(Algorithm.ONE_SHOT, 1)
ONE_PARTS = Launch(Algorithm.ONE_SHOT, 4)
TWO = Launch(Algorithm.TWO_SHOT, 4)
ISLAND = Launch(Algorithm.ISLAND, 4)
OF_WORLD = {2: (ONE, TWO), 4: (ONE_PARTS, TWO), 8: (TWO, ISLAND)}
ONE_SLOT, NO_CLEAR, KEEP_MARKS = 1, 2, 3
WORLDS = pytest.mark.parametrize("world", [2, 4, 8])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(("torch", "triton", "tests.ar_streams"), CUDA_DEVICE_MAX_CONNECTIONS="32")
    yield made
    made.close()


def run(server: Server, scenario: str, *args: Any) -> Any:
    return server.run(f"tests.ar_streams:{scenario}", 1, *args, limit_seconds=70)[0]


@WORLDS
def test_bit_for_bit(server: Server, world: int) -> None:
    """Special rows, whole numbers, 1 to 64 rows, in one workspace one after the other."""
    plan = [
        {"launch": launch, "rows": rows, "whole": rows == 2}
        for launch in OF_WORLD[world]
        for rows in (3, 1, 8, 2, 6)
    ]
    plan += [{"launch": TWO, "rows": rows} for rows in (33, 64)]
    assert run(server, "correct", world, HIDDEN, plan) == []


@WORLDS
def test_plain_and_fp16(server: Server, world: int) -> None:
    launch = OF_WORLD[world][-1]
    plan = [
        {"launch": launch, "rows": 5, "fused": False},
        {"launch": launch, "rows": 5, "dtype": "fp16"},
        {"launch": launch, "rows": 1, "fused": False},
    ]
    assert run(server, "correct", world, HIDDEN, plan) == []


def test_other_widths(server: Server) -> None:
    plan = [{"launch": Launch(Algorithm.TWO_SHOT, 1), "rows": 5}]
    assert run(server, "correct", 8, 256, plan) == []
    assert run(server, "correct", 4, 6144, plan) == []


@WORLDS
def test_graph_replays(server: Server, world: int) -> None:
    """123 calls (an odd number) of three shapes and two algorithms, inputs changed 64 times."""
    first, second = OF_WORLD[world]
    plan = [
        {"launch": second, "rows": 3},
        {"launch": first, "rows": 1},
        {"launch": second, "rows": 5},
    ]
    assert run(server, "graphs", world, HIDDEN, plan, 123, 64) == []


def test_one_kernel_a_call(server: Server) -> None:
    plan = [{"launch": TWO, "rows": 3}, {"launch": ONE, "rows": 1}, {"launch": TWO, "rows": 8}]
    assert run(server, "nodes", 2, plan) == 3


@pytest.mark.parametrize("launch", [TWO, ISLAND], ids=lambda launch: launch.name)
def test_each_rank_late_in_turn(server: Server, launch: Launch) -> None:
    assert run(server, "late", 8, [{"launch": launch, "rows": 3}]) == []


@pytest.mark.parametrize(
    ("launch", "rows", "calls", "fault", "stall", "late_call"),
    [
        (ONE, 1, 2, ONE_SLOT, 4000, None),
        (TWO, 1, 3, NO_CLEAR, 0, 2),
        (ONE, 5, 1, KEEP_MARKS, 0, None),
    ],
    ids=["without the second slot", "without clearing", "without unmark"],
)
def test_protections_are_needed(
    server: Server, launch: Launch, rows: int, calls: int, fault: int, stall: int, late_call: Any
) -> None:
    """The same race passes as built, and is seen once the protection is out."""
    plan = [{"launch": launch, "rows": rows} for _ in range(calls)]
    assert run(server, "race", plan, 0, stall, late_call) == []
    assert run(server, "race", plan, fault, stall, late_call) != []


def test_absent_rank_is_named_and_the_workspace_recovers(server: Server) -> None:
    error, wrong = run(server, "absent", 4, [{"launch": TWO, "rows": 3}], 2)
    assert "waited for rank 2 in phase" in error
    assert wrong == []
