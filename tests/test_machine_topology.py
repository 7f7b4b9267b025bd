from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify.errors import ConfigError
from fastverify.machine import Gpu, Kind, Machine, NumaNode, classify
from fastverify.machine.facts import select
from fastverify.machine.topology import LEVELS, rank_order
from tests.machines import machine, machines

FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))

# name, tp -> kind, islands, worst link, switches, sockets, granted
TABLE = [
    ("one-switch", 1, Kind.SINGLE, (), None, 0, 1, None),
    ("one-switch", 2, Kind.ONE_SWITCH, ((0, 1),), "PIX", 1, 1, True),
    ("one-switch", 4, Kind.ONE_SWITCH, ((0, 1, 2, 3),), "PXB", 1, 1, True),
    ("two-switches", 4, Kind.ONE_SWITCH, ((0, 1, 2, 3),), "PIX", 1, 1, True),
    ("two-switches", 8, Kind.TWO_SWITCHES, FOURS, "NODE", 2, 1, True),
    ("two-sockets", 4, Kind.ONE_SOCKET, ((0, 1, 2, 3),), "NODE", 0, 1, True),
    ("two-sockets", 8, Kind.TWO_SOCKETS, FOURS, "SYS", 0, 2, True),
    ("four-islands", 4, Kind.TWO_SWITCHES, ((0, 1), (2, 3)), "NODE", 2, 1, True),
    ("four-islands", 8, Kind.ISLANDS, PAIRS, "SYS", 4, 2, True),
    ("laptop", 1, Kind.SINGLE, (), None, 0, 1, None),
    ("none", 1, Kind.NONE, (), None, 0, None, None),
    ("h200", 1, Kind.SINGLE, (), None, 0, 0, None),
    ("two-h200", 2, Kind.NVLINK, ((0, 1),), "NV", 0, 1, True),
    ("vm", 4, Kind.VM, (), "PHB", 0, 1, False),
]


@pytest.mark.parametrize(
    ("name", "tp", "kind", "islands", "worst", "switches", "sockets", "ok"), TABLE
)
def test_recorded_machines(name, tp, kind, islands, worst, switches, sockets, ok) -> None:
    topology = classify(machine(name), tp)
    assert topology.kind is kind
    assert topology.islands == islands
    assert topology.worst_link == worst
    assert topology.switches == switches
    assert topology.sockets == (sockets or (1 if name == "h200" else None))
    assert topology.granted is ok
    assert topology.sm120 is (name not in ("none", "h200", "two-h200"))
    assert not topology.mixed_models


def _linked(rows: str, **facts: object) -> Machine:
    """A machine from a link matrix written as words."""
    links = tuple(tuple(row.split()) for row in rows.strip().splitlines())
    count = len(links)
    gpus = tuple(Gpu(index=i, name="a", compute_capability=(12, 0)) for i in range(count))
    return Machine(gpus=gpus, installed=count, links=links, virtualisation="none", **facts)


def test_nvlink_pairs_across_pcie_are_islands() -> None:
    bridged = _linked("X PHB NV4 PHB\nPHB X PHB NV4\nNV4 PHB X PHB\nPHB NV4 PHB X")
    topology = classify(bridged, 4)
    assert topology.kind is Kind.ISLANDS
    assert topology.islands == ((0, 2), (1, 3))
    assert topology.switches == 0
    assert not topology.adjacent
    assert rank_order(topology) == (0, 2, 1, 3)
    assert classify(select(bridged, rank_order(topology)), 4).adjacent


def test_unequal_groups_are_mixed() -> None:
    assert classify(_linked("X PIX PHB\nPIX X PHB\nPHB PHB X"), 3).kind is Kind.MIXED
    assert classify(_linked("X NV4 PHB\nNV4 X PHB\nPHB PHB X"), 3).kind is Kind.MIXED


def test_quadrants_of_one_socket_are_one_socket() -> None:
    rows = "X SYS SYS SYS\nSYS X SYS SYS\nSYS SYS X SYS\nSYS SYS SYS X"
    assert classify(_linked(rows, cpu_sockets=1), 4).kind is Kind.ONE_SOCKET
    # Without a socket count the matrix alone decides, and four lone GPUs have no regular shape.
    assert classify(_linked(rows), 4).kind is Kind.MIXED


def test_quadrants_of_two_sockets_group_by_socket() -> None:
    two = machine("two-sockets")
    nodes = tuple(NumaNode(i, f"{i}", i // 4) for i in range(8))
    gpus = tuple(msgspec.structs.replace(gpu, numa_node=i) for i, gpu in enumerate(two.gpus))
    far = tuple(tuple("X" if i == j else "SYS" for j in range(8)) for i in range(8))
    split = msgspec.structs.replace(two, numa_nodes=nodes, gpus=gpus, links=far)
    assert classify(split, 8).kind is Kind.TWO_SOCKETS
    assert classify(split, 8).islands == FOURS


def test_an_unread_pair_is_unknown() -> None:
    assert classify(_linked("X ?\n? X"), 2).kind is Kind.UNKNOWN
    assert (
        classify(msgspec.structs.replace(machine("one-switch"), links=()), 4).kind is Kind.UNKNOWN
    )


def test_a_guest_is_not_believed_except_about_nvlink() -> None:
    for kind in ("vm", "wsl"):
        guest = msgspec.structs.replace(machine("one-switch"), virtualisation=kind)
        assert classify(guest, 4).kind is Kind.VM
        nvlink = msgspec.structs.replace(machine("two-h200"), virtualisation=kind)
        assert classify(nvlink, 2).kind is Kind.NVLINK


def test_one_refused_direction_is_not_granted() -> None:
    base = machine("one-switch")
    rows = [list(row) for row in base.p2p_write]
    rows[2][1] = "CNS"
    changed = msgspec.structs.replace(base, p2p_write=tuple(map(tuple, rows)))
    assert classify(changed, 4).granted is False
    assert classify(changed, 2).granted is True
    assert classify(msgspec.structs.replace(base, p2p_read=()), 4).granted is None


def test_mixed_models_are_seen() -> None:
    base = machine("one-switch")
    older = msgspec.structs.replace(base.gpus[3], name="RTX 4090", compute_capability=(8, 9))
    changed = msgspec.structs.replace(base, gpus=(*base.gpus[:3], older))
    assert classify(changed, 4).mixed_models
    assert not classify(changed, 4).sm120
    assert not classify(changed, 3).mixed_models


def test_tp_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 0"):
        classify(machine("none"), 0)


@pytest.mark.parametrize("name", ["two-switches", "four-islands", "two-sockets"])
def test_gpu_order_changes_ranks_but_not_the_shape(name: str) -> None:
    base = machine(name)
    order = list(range(8))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        shuffled = select(base, tuple(order))
        topology = classify(shuffled, 8)
        plain = classify(base, 8)
        assert (topology.kind, topology.worst_link) == (plain.kind, plain.worst_link)
        cards = {frozenset(shuffled.gpus[r].index for r in island) for island in topology.islands}
        assert cards == {frozenset(island) for island in plain.islands}


@settings(max_examples=50)
@given(machines(), st.integers(1, 12))
def test_total_and_consistent(value: Machine, tp: int) -> None:
    topology = classify(value, tp)
    assert topology == classify(value, tp)
    assert topology.ranks == min(tp, len(value.gpus))
    if topology.islands:
        assert sorted(rank_order(topology)) == list(range(topology.ranks))
    assert (topology.worst_link is None) == (topology.best_link is None)
    if topology.worst_link is not None:
        assert LEVELS.index(topology.best_link) <= LEVELS.index(topology.worst_link)
    assert (topology.kind is Kind.NONE) == (not value.gpus)
