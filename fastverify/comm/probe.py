"""Proof that each GPU can write into the memory of each other one: the destination checks.

Drivers and firmware can report peer access, and even read back what they wrote, while the
destination never sees it. So each ordered pair writes a fresh pattern and the destination looks
for it in its own memory, in child processes that are killed when they do not answer in time.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Protocol

import msgspec

PATTERN_BYTES = 4096
ROUNDS = 2
ARRIVAL_SECONDS = 0.05


class Fabric(Protocol):
    """Memory of ranks as the proof needs it: a slot per source in each rank's memory."""

    def write(self, source: int, target: int, pattern: bytes) -> None:
        """`source` writes into its slot in the memory of `target`, and waits for the write."""

    def read(self, target: int, source: int) -> bytes:
        """What `target` finds in that slot of its own memory."""


class Proof(msgspec.Struct, frozen=True):
    """failures: one sentence per pair that failed; empty when the peers are proved.

    key: driver, machine and mapping that the proof holds for.
    """

    key: str
    world: int
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures

    def verdict(self) -> str:
        """One sentence for the log."""
        if self.passed:
            return f"all {self.world * (self.world - 1)} pairs of GPUs can write to each other."
        return (
            f"no peer all-reduce will be used, NCCL serves instead: {self.failures[0]}"
            + (f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else "")
            + "."
        )


def prove(fabric: Fabric, world: int, *, key: str = "", seed: int | None = None) -> Proof:
    """Write and check every ordered pair, with patterns that no earlier run has used.

    In a second round each slot gets another pattern, and at the end all slots are read again, so
    that a write which arrives late, in another's place or twice is seen too.
    """
    fresh = random.Random(seed) if seed is not None else random.SystemRandom()
    failures: dict[tuple[int, int], str] = {}
    pairs = list(itertools.permutations(range(world), 2))
    last: dict[tuple[int, int], bytes] = {}
    for _ in range(ROUNDS):
        for source, target in pairs:
            pattern = fresh.randbytes(PATTERN_BYTES)
            problem = _one_pair(fabric, source, target, pattern)
            if problem:
                failures.setdefault((source, target), problem)
            last[source, target] = pattern
    for source, target in pairs:
        if (source, target) in failures:
            continue
        try:
            kept = fabric.read(target, source) == last[source, target]
        except (OSError, EOFError, TimeoutError) as error:
            failures[source, target] = f"GPU {target} stopped answering ({_text(error)})"
            continue
        if not kept:
            failures[source, target] = f"what GPU {source} wrote to GPU {target} changed later"
    return Proof(key, world, tuple(failures[pair] for pair in pairs if pair in failures))


def _one_pair(fabric: Fabric, source: int, target: int, pattern: bytes) -> str:
    try:
        fabric.write(source, target, pattern)
        deadline = time.monotonic() + ARRIVAL_SECONDS
        found = fabric.read(target, source)
        while found != pattern and time.monotonic() < deadline:
            found = fabric.read(target, source)
    except (OSError, EOFError, TimeoutError) as error:
        return f"GPU {source} could not write to GPU {target} ({_text(error)})"
    if found == pattern:
        return ""
    wrong = sum(a != b for a, b in zip(found, pattern, strict=True))
    return (
        f"GPU {source} wrote {len(pattern)} bytes to GPU {target}, which sees {wrong} of them wrong"
    )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
