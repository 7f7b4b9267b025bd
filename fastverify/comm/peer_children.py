"""The fabric of real GPUs for the proof of peers: one child process per GPU, each with a limit."""

from __future__ import annotations

import multiprocessing
import pathlib
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from fastverify.comm.probe import PATTERN_BYTES, Proof, prove

# Importing torch and making a context, on a machine that is busy loading weights.
START_SECONDS = 60.0
ANSWER_SECONDS = 5.0


def proved(devices: Sequence[int], key: str, cache: pathlib.Path | None = None) -> Proof:
    """The proof for these GPUs, from the cache when one with this key has passed.

    Only a pass is kept: a failure is looked at again at every start.
    """
    known = _load(cache, key) if cache is not None else None
    if known is not None and known.world == len(devices):
        return known
    fabric = ProcessFabric(devices)
    try:
        failure = fabric.start()
        if failure:
            return Proof(key, len(devices), (failure,))
        proof = prove(fabric, len(devices), key=key)
    finally:
        fabric.close()
    if cache is not None and proof.passed:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_bytes(msgspec.json.encode(proof))
    return proof


class ProcessFabric:
    """Children that hold a slot per source each and write into each other's through CUDA IPC."""

    def __init__(self, devices: Sequence[int]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        for rank, device in enumerate(devices):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(
                target=_child, args=(theirs, rank, len(devices), device), daemon=True
            )
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def start(self) -> str:
        """Map every child's memory in every other; returns a sentence when that fails."""
        deadline = time.monotonic() + START_SECONDS
        try:
            handles = [self._answer(rank, deadline) for rank in range(len(self._pipes))]
            for pipe in self._pipes:
                pipe.send(("map", handles))
            for rank in range(len(self._pipes)):
                self._answer(rank, deadline)
        except (OSError, EOFError, TimeoutError) as error:
            return f"the GPUs could not map each other's memory ({error or 'a child died'})"
        return ""

    def write(self, source: int, target: int, pattern: bytes) -> None:
        self._ask(source, ("write", target, pattern))

    def read(self, target: int, source: int) -> bytes:
        found: bytes = self._ask(target, ("read", source))
        return found

    def close(self) -> None:
        """End all children, also those that hang."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join(timeout=10)

    def _ask(self, rank: int, request: tuple[Any, ...]) -> Any:
        self._pipes[rank].send(request)
        return self._answer(rank, time.monotonic() + ANSWER_SECONDS)

    def _answer(self, rank: int, deadline: float) -> Any:
        if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"the process of GPU {rank} does not answer")
        good, value = self._pipes[rank].recv()
        if not good:
            raise OSError(value)
        return value


def _child(pipe: Connection, rank: int, world: int, device: int) -> None:
    try:
        memory = _ChildMemory(rank, world, device)
        pipe.send((True, memory.handle))
    except Exception as error:
        pipe.send((False, f"GPU {rank}: {error}"))
        return
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(memory, what)(*arguments)))
        except Exception as error:
            pipe.send((False, f"GPU {rank}: {error}"))


class _ChildMemory:
    def __init__(self, rank: int, world: int, device: int) -> None:
        import torch

        torch.cuda.set_device(device)
        torch.cuda.current_stream()
        # After the device, so that a machine without it answers before the long import.
        from flashinfer.comm.cuda_ipc import cudart

        from fastverify.comm.ipc import view_bytes

        self._rank = rank
        self._base = cudart.cudaMalloc(world * PATTERN_BYTES)
        self._own = view_bytes(
            self._base.value, world * PATTERN_BYTES, torch.device("cuda", device)
        )
        self._own.zero_()
        self.handle = bytes(cudart.cudaIpcGetMemHandle(self._base))
        torch.cuda.synchronize()

    def map(self, handles: list[bytes]) -> None:
        from flashinfer.comm.cuda_ipc import cudaIpcMemHandle_t, cudart

        self._peers = [
            self._base.value
            if peer == self._rank
            else cudart.cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(handle)).value
            for peer, handle in enumerate(handles)
        ]

    def write(self, target: int, pattern: bytes) -> None:
        import torch

        from fastverify.kernels.triton.ar_probe import probe_kernel

        source = torch.frombuffer(bytearray(pattern), dtype=torch.uint8).cuda()
        address = self._peers[target] + self._rank * PATTERN_BYTES
        probe_kernel[(1,)](source, address, PATTERN_BYTES // 16)
        torch.cuda.synchronize()

    def read(self, source: int) -> bytes:
        slot = self._own[source * PATTERN_BYTES : (source + 1) * PATTERN_BYTES]
        return bytes(slot.cpu().numpy())


def _load(cache: pathlib.Path, key: str) -> Proof | None:
    try:
        proof = msgspec.json.decode(cache.read_bytes(), type=Proof)
    except (OSError, msgspec.DecodeError):
        return None
    return proof if proof.key == key and proof.passed else None
