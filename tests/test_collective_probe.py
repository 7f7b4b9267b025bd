"""The proof of peers against memory that lies in the ways real machines do."""

from __future__ import annotations

import pytest

from fastverify.comm import peer_children
from fastverify.comm.probe import PATTERN_BYTES, Proof, prove


class Honest:
    """Writes arrive at once. Each liar below breaks the pair from rank 1 to rank 2."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], bytes] = {}

    def write(self, source: int, target: int, pattern: bytes) -> None:
        if (source, target) == (1, 2):
            self.broken_write(pattern)
        else:
            self.memory[target, source] = pattern

    def broken_write(self, pattern: bytes) -> None:
        self.memory[2, 1] = pattern

    def read(self, target: int, source: int) -> bytes:
        return self.memory.get((target, source), bytes(PATTERN_BYTES))


class Mirror(Honest):
    """The writer would read back its own window; the destination sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.window = b""

    def broken_write(self, pattern: bytes) -> None:
        self.window = pattern


class Dropped(Honest):
    """The first write arrives, later ones do not."""

    def broken_write(self, pattern: bytes) -> None:
        self.memory.setdefault((2, 1), pattern)


class Late(Honest):
    """A write arrives when the next one is made."""

    waiting = bytes(PATTERN_BYTES)

    def broken_write(self, pattern: bytes) -> None:
        self.memory[2, 1], self.waiting = self.waiting, pattern


class FlippedBit(Honest):
    def broken_write(self, pattern: bytes) -> None:
        self.memory[2, 1] = bytes([pattern[0] ^ 1]) + pattern[1:]


class WrongPlace(Honest):
    """Right when looked at first, but it lands in another rank's slot as well."""

    def broken_write(self, pattern: bytes) -> None:
        self.memory[2, 1] = pattern
        self.memory[0, 1] = pattern


class Hangs(Honest):
    def broken_write(self, pattern: bytes) -> None:
        raise TimeoutError("the process of GPU 1 does not answer")


def test_honest_memory_passes_and_every_pair_is_tried() -> None:
    fabric = Honest()
    proof = prove(fabric, 4, key="k")
    assert proof.passed and proof.verdict() == "all 12 pairs of GPUs can write to each other."
    assert set(fabric.memory) == {(t, s) for t in range(4) for s in range(4) if s != t}


@pytest.mark.parametrize("kind", [Mirror, Dropped, Late, FlippedBit, WrongPlace, Hangs])
def test_a_lying_pair_vetoes_all(kind: type[Honest]) -> None:
    proof = prove(kind(), 4)
    assert not proof.passed
    assert "GPU 1" in proof.failures[0]
    assert proof.verdict().startswith("no peer all-reduce will be used, NCCL serves instead: ")


def test_one_flipped_bit_is_counted() -> None:
    (failure,) = prove(FlippedBit(), 4).failures
    assert failure == "GPU 1 wrote 4096 bytes to GPU 2, which sees 1 of them wrong"


def test_patterns_are_fresh_each_time() -> None:
    first, second = Honest(), Honest()
    prove(first, 2)
    prove(second, 2)
    assert first.memory[1, 0] != second.memory[1, 0]


def test_only_a_pass_is_cached(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    made: list[Honest] = []

    class Fabric(Honest):
        lies = True

        def __init__(self, devices: list[int]) -> None:
            super().__init__()
            made.append(self)

        def start(self) -> str:
            return ""

        def close(self) -> None:
            pass

        def broken_write(self, pattern: bytes) -> None:
            if not self.lies:
                super().broken_write(pattern)

    monkeypatch.setattr(peer_children, "ProcessFabric", Fabric)
    cache = tmp_path / "proof.json"
    devices = [0, 1, 2, 3]
    assert not peer_children.proved(devices, "key", cache).passed
    assert not cache.exists()
    Fabric.lies = False
    assert peer_children.proved(devices, "key", cache).passed
    assert peer_children.proved(devices, "key", cache).passed
    assert len(made) == 2, "a cached pass must not be proved again"
    peer_children.proved(devices, "another driver", cache)
    assert len(made) == 3


def test_children_without_a_gpu_are_an_answer_in_time() -> None:
    """On a machine without two GPUs the real fabric fails with a sentence, and ends."""
    import torch

    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has peers")
    proof = peer_children.proved([0, 1], "key")
    assert not proof.passed
    assert "could not map each other's memory" in proof.failures[0]


def test_verdict_counts_the_rest() -> None:
    assert Proof("k", 4, ("a", "b", "c")).verdict().endswith(": a (and 2 more).")
