"""Our all-reduce kernels between real processes over CUDA IPC, all on one GPU: slow, but real."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from fastverify.comm.launch import Algorithm, Launch
from fastverify.comm.peer_children import proved
from tests.spawn import Server

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(("torch", "triton", "tests.ar_ipc"), GLOO_SOCKET_IFNAME="lo")
    yield made
    made.close()


@pytest.mark.parametrize("world", [2, 4])
def test_processes_over_cuda_ipc(server: Server, world: int, tmp_path: pathlib.Path) -> None:
    launches = [Launch(Algorithm.TWO_SHOT, 4), Launch(Algorithm.ONE_SHOT, 1)]
    results = server.run("tests.ar_ipc:calls", world, str(tmp_path), launches, 5, limit_seconds=85)
    assert results == [[]] * world


def test_peers_on_one_gpu_are_proved_by_child_processes() -> None:
    """Two processes map each other's memory; the destination sees what the kernel stored."""
    proof = proved([0, 0], "one GPU, two processes")
    assert proof.passed, proof.failures


def test_tuning_verifies_measures_and_caches(server: Server, tmp_path: pathlib.Path) -> None:
    results = server.run("tests.ar_ipc:tuned", 2, str(tmp_path), limit_seconds=85)
    assert {tuple(result[:2]) for result in results} == {("fastverify.two_shot_4",) * 2}
    assert all(seconds < 3 for _, _, seconds in results)
