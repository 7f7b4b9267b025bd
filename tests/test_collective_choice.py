"""The choice of a backend per call: pure functions of agreed times."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.comm.choice import (
    Measured,
    Table,
    calls_to_measure,
    choose,
    covers,
    describe,
    load_table,
    machine_key,
    save_table,
)
from fastverify.comm.collective import Call
from fastverify.errors import ConfigError

THREE = Call(3, 7168)
NAMES = ("nccl", "pcie_ipc", "fastverify.two_shot_4")
TIMES = st.none() | st.floats(0.5, 500.0)


@given(st.lists(TIMES, min_size=3, max_size=3))
def test_the_fastest_wins_and_nccl_needs_no_reason(times: list[float | None]) -> None:
    measured = [Measured(name, THREE, time) for name, time in zip(NAMES, times, strict=True)]
    (row,) = choose(measured)
    ran = {name: time for name, time in zip(NAMES, times, strict=True) if time is not None}
    if not ran:
        assert row.contender == "nccl" and row.time_us is None
        return
    assert row.contender in ran
    if row.contender == "nccl":
        assert min(ran.values()) >= ran["nccl"] * 0.96
    else:
        assert ran[row.contender] == min(ran.values())


def test_order_of_measurements_does_not_matter() -> None:
    measured = [Measured(name, THREE, 5.0) for name in NAMES[1:]]
    assert choose(measured) == choose(measured[::-1])


def test_a_gain_within_the_noise_stays_with_nccl() -> None:
    (row,) = choose([Measured("nccl", THREE, 20.0), Measured("pcie_ipc", THREE, 19.8)])
    assert row.contender == "nccl"


def test_forced_backend_and_where_it_declines() -> None:
    eight = Call(8, 7168)
    measured = [
        Measured("nccl", THREE, 5.0),
        Measured("pcie_ipc", THREE, 9.0),
        Measured("nccl", eight, 5.0),
        Measured("pcie_ipc", eight, None, "too many rows"),
    ]
    assert [row.contender for row in choose(measured, "pcie_ipc")] == ["pcie_ipc", "nccl"]
    with pytest.raises(ConfigError, match="--collective fast names no backend .* nccl, pcie_ipc"):
        choose(measured, "fast")


def test_calls_are_those_of_the_server() -> None:
    calls = calls_to_measure(
        hidden=7168, dtype="bfloat16", verify=[1, 3, 96], draft=[1, 2], max_rows=64
    )
    assert [(call.rows, call.fused) for call in calls] == [
        (1, False), (1, True), (2, False), (3, False), (3, True),
    ]  # fmt: skip


def test_a_table_survives_the_disk_and_only_for_its_key(tmp_path: pathlib.Path) -> None:
    rows = choose([Measured("nccl", THREE, 20.0), Measured("pcie_ipc", THREE, 9.0)])
    table = Table("key", rows, "2026-11-29", "fastverify tune")
    path = tmp_path / "folder" / "table.json"
    save_table(path, table)
    assert load_table(path, "key") == table
    assert load_table(path, "other") is None
    path.write_bytes(path.read_bytes()[:-40])
    assert load_table(path, "key") is None
    assert load_table(tmp_path / "absent.json", "key") is None


def test_a_table_must_cover_calls_and_backends() -> None:
    table = Table("key", choose([Measured("pcie_ipc", THREE, 9.0)]), "", "")
    assert covers(table, [THREE], ["nccl", "pcie_ipc"])
    assert not covers(table, [THREE, Call(1, 7168)], ["pcie_ipc"])
    assert not covers(table, [THREE], ["nccl"])


def test_lines_for_a_person() -> None:
    rows = choose([Measured("nccl", THREE, 20.0), Measured("pcie_ipc", THREE, 8.0)])
    assert describe(rows) == [("3 x 7168 bfloat16, fused", "pcie_ipc", "8.0 us", "2.50x")]


def test_the_key_changes_with_every_fact() -> None:
    facts = {"driver": "580", "gpus": "8"}
    assert machine_key(facts) == machine_key(dict(reversed(facts.items())))
    assert len({machine_key(facts), machine_key({**facts, "driver": "590"})}) == 2
