"""The collective interface: declines, misuse, and the reference between real processes."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

from fastverify.comm import launch as ar
from fastverify.comm.collective import Call, Chosen, Collective, Fused, call_of
from fastverify.comm.layout import Layout
from fastverify.comm.peer import Peer
from fastverify.comm.workspace import describe, local_world
from fastverify.errors import ConfigError
from tests.spawn import RanksFailed, Server

TWO = ar.Launch(ar.Algorithm.TWO_SHOT, 4)


class Fake(Collective):
    """Takes up to `limit` rows and counts."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit, self.seen = name, limit, 0

    def why_not(self, call: Call) -> str | None:
        return None if call.rows <= self.limit else "too many rows"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        self.seen += 1
        return x.clone()

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        return x.clone(), residual.clone()


@pytest.fixture(scope="module")
def peer() -> Peer:
    return Peer(TWO, local_world(Layout(8, 7168, 8), "cpu")[0])


@pytest.mark.parametrize("world", [1, 3, 6, 16])
def test_world_sizes_that_cannot_be(world: int) -> None:
    with pytest.raises(ConfigError, match=f"needs 2, 4 or 8 ranks, not {world}"):
        Layout(world, 7168, 8)


@pytest.mark.parametrize("hidden", [0, 128, 7000])
def test_hidden_sizes_that_cannot_be(hidden: int) -> None:
    with pytest.raises(ConfigError, match=f"multiple of 256, not {hidden}"):
        Layout(8, hidden, 8)


@pytest.mark.parametrize("rows", [0, 65])
def test_plans_that_are_too_large(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 64 rows, not {rows}"):
        Layout(8, 7168, rows)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Call(3, 7168, "float32"), "float32, only bfloat16 and float16"),
        (Call(3, 6144), "hidden 6144, planned for 7168"),
        (Call(9, 7168), "9 rows, planned for 8"),
        (Call(0, 7168), "0 rows, planned for 8"),
        (Call(3, 7168, contiguous=False), "not contiguous"),
    ],
)
def test_peer_declines_before_touching_anything(peer: Peer, call: Call, reason: str) -> None:
    assert reason in (peer.why_not(call) or "")
    before = peer._workspace.memory.clone()
    x = torch.zeros(call.rows, call.hidden, dtype=getattr(torch, call.dtype))
    if not call.contiguous:
        x = torch.zeros(call.rows, 2 * call.hidden, dtype=torch.bfloat16)[:, ::2]
    assert peer.all_reduce(x) is None
    assert peer.all_reduce_residual_rmsnorm(
        x, x.clone(), x.new_zeros(call.hidden), 0.0
    ) is None or (not call.contiguous)
    assert torch.equal(peer._workspace.memory, before)


def test_misuse_raises() -> None:
    x = torch.zeros(3, 256)
    with pytest.raises(ConfigError, match="residual must match x"):
        call_of(x, x[:2], x[0])
    with pytest.raises(ConfigError, match="pass all three in one type"):
        call_of(x, x.double(), x[0])


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("rows", range(1, 65))
def test_every_number_of_rows_has_a_launch(world: int, rows: int) -> None:
    layout = Layout(world, 7168, 64)
    launches = ar.admitted(layout, rows, 64)
    assert any(launch.algorithm is ar.Algorithm.TWO_SHOT for launch in launches)
    for launch in launches:
        threads = 32 * ar.warps(launch, layout)
        tile = ar.constants(launch, layout, bf16=True, fused=True)["TILE"]
        assert ar.width(launch, layout) <= tile
        assert threads <= tile, "two threads would store the same unit"
        assert tile * (1 if launch.algorithm is ar.Algorithm.ONE_SHOT else 8) // threads <= 64


def test_peers_are_in_the_order_they_are_served() -> None:
    bases = tuple(range(8))
    assert ar.ordered_peers(ar.Algorithm.TWO_SHOT, 6, bases) == (7, 0, 1, 2, 3, 4, 5, 6)
    assert ar.ordered_peers(ar.Algorithm.ISLAND, 6, bases) == (7, 4, 5, 6, 2)


def test_error_words_read_as_sentences() -> None:
    text = describe(41 << 24 | 3 << 16 | 2 << 8 | 5)
    assert text.startswith("rank 2 waited for rank 5 in phase gather of all-reduce 41")


def test_the_table_picks_and_leaves_the_rest() -> None:
    small, large = Fake("small", 2), Fake("large", 8)
    chosen = Chosen(
        [small, large],
        {
            Call(2, 256, "float32", False): "small",
            Call(4, 256, "float32", False): "nccl",
            Call(8, 256, "float32", False): "large",
        },
    )
    names = {rows: chosen.backend_for(Call(rows, 256, "float32", False)) for rows in (1, 3, 5, 9)}
    assert [found.name if found else None for found in names.values()] == [
        "small", None, "large", None,
    ]  # fmt: skip
    assert chosen.all_reduce(torch.zeros(3, 256)) is None
    assert chosen.all_reduce(torch.zeros(5, 256)) is not None
    assert (small.seen, large.seen) == (0, 1)


def test_a_table_with_an_absent_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="names b12x, but only small can run here"):
        Chosen([Fake("small", 2)], {Call(2, 256): "b12x"})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(("tests.collective_ranks",), GLOO_SOCKET_IFNAME="lo")
    yield made
    made.close()


def test_reference_over_gloo(server: Server, tmp_path: pathlib.Path) -> None:
    """TP=2 on the CPU: sums in rank order, out of place, equal on all ranks."""
    assert server.run("tests.collective_ranks:reference", 2, str(tmp_path)) == ["", ""]


def test_different_plans_are_an_error_on_every_rank(server: Server, tmp_path: pathlib.Path) -> None:
    first, second = server.run("tests.collective_ranks:different_plans", 2, str(tmp_path))
    assert "different plans: rank 0: 3 rows; rank 1: 4 rows" in first
    assert first == second


def test_a_failure_on_one_rank_is_an_error_on_every_rank(
    server: Server, tmp_path: pathlib.Path
) -> None:
    errors = server.run("tests.collective_ranks:one_fails", 2, str(tmp_path))
    assert errors == ["could not map memory: rank 1: no memory left"] * 2


def test_a_rank_that_dies_is_reported(server: Server) -> None:
    with pytest.raises(RanksFailed, match="rank 1: died"):
        server.run("tests.collective_ranks:die", 2, limit_seconds=5)
