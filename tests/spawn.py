"""One process per rank for tests: forked from a server that has imported torch once.

`Server(env).run("module:function", world, *args)` calls `function(Rank, *args)` in `world`
processes and returns their results in rank order. Every run has a time limit; when a rank fails
or the limit passes, all its processes are killed. The server dies with the test process.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from typing import Any, BinaryIO, NamedTuple

_PR_SET_PDEATHSIG = 1
SHARED_BYTES = 64 << 20


class RanksFailed(AssertionError):
    """A rank raised, died or did not finish in time; the message holds what each one said."""


class Rank(NamedTuple):
    """What a rank's function gets. `shared` is the address of memory common to all ranks."""

    rank: int
    world: int
    shared: int
    barrier: Any


class Server:
    """A process that has imported `preload` and forks the ranks of each run from itself."""

    def __init__(self, preload: tuple[str, ...], **env: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spawn", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            start_new_session=True,
        )

    def run(self, target: str, world: int, *args: Any, limit_seconds: float = 30.0) -> list[Any]:
        """Results in rank order; raises RanksFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, (target, world, args, limit_seconds))
        # The first run waits for the imports as well.
        ready, _, _ = select.select([self._process.stdout], [], [], limit_seconds + 60)
        if not ready:
            self.close()
            raise RanksFailed(f"{target}: the server of the ranks does not answer")
        failed, results = _receive(self._process.stdout)
        if failed:
            raise RanksFailed("\n".join(f"rank {i}: {text}" for i, text in enumerate(results)))
        return list(results)

    def close(self) -> None:
        """End the server and whatever it has forked."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=20)


def hang_rank_one(rank: Rank) -> None:
    """For the test of the time limit."""
    if rank.rank == 1:
        time.sleep(600)


def _send(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise RanksFailed("the server of the ranks has died")
    return pickle.loads(pipe.read(struct.unpack("<q", header)[0]))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve() -> None:
    _die_with_parent()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a rank prints must not reach the pipe of answers
    for module in sys.argv[1:]:
        importlib.import_module(module)
    while True:
        try:
            target, world, args, limit_seconds = _receive(requests)
        except RanksFailed:
            return
        _send(answers, _run_ranks(target, world, args, limit_seconds))


def _run_ranks(target: str, world: int, args: Any, limit_seconds: float) -> tuple[bool, list[Any]]:
    shared = mmap.mmap(-1, SHARED_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    barrier = multiprocessing.get_context("fork").Barrier(world, timeout=limit_seconds)
    pipes: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _die_with_parent()
            os.close(reader)
            _be_rank(target, Rank(rank, world, address, barrier), args, writer)
        os.close(writer)
        pipes[rank] = (reader, child)
    deadline = time.monotonic() + limit_seconds
    try:
        return _collect(pipes, deadline)
    finally:
        for reader, child in pipes.values():
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _be_rank(target: str, rank: Rank, args: Any, writer: int) -> None:
    try:
        module, name = target.split(":")
        answer = (True, getattr(importlib.import_module(module), name)(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(writer, "wb") as pipe:
        _send(pipe, answer)
    # Skips the exit handlers of the server, which this process inherited.
    os._exit(0)


def _collect(pipes: dict[int, tuple[int, int]], deadline: float) -> tuple[bool, list[Any]]:
    waiting = {reader: rank for rank, (reader, _) in pipes.items()}
    answers: dict[int, tuple[bool, Any]] = {}
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        for reader in ready:
            rank = waiting.pop(reader)
            with os.fdopen(os.dup(reader), "rb") as pipe:
                try:
                    answers[rank] = _receive(pipe)
                except RanksFailed:
                    answers[rank] = (False, "died")
    for rank in waiting.values():
        answers[rank] = (False, "did not finish in time")
    ordered = [answers[rank] for rank in sorted(answers)]
    failed = any(not good for good, _ in ordered)
    return failed, [value if good != failed else "finished" for good, value in ordered]


if __name__ == "__main__":
    _serve()
