"""Memory that ranks share: laid out, filled with arrival marks, and asked for errors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from fastverify.comm.layout import CONTROL_BYTES, Layout
from fastverify.errors import FastverifyError

PHASES = {1: "scatter", 2: "cross", 3: "gather", 4: "tags"}


class PeerError(FastverifyError):
    """A rank waited longer for another than any rank may be late, or peer memory is unusable."""


class Workspace(msgspec.Struct, frozen=True):
    """What one rank needs to launch our kernels.

    bases: address of each rank's memory as mapped in this process, in rank order. memory: this
    rank's own, as bytes, which `clear` has prepared on every rank before the first call.
    One workspace serves one stream; calls on another stream must be ordered after it.
    """

    layout: Layout
    rank: int
    bases: tuple[int, ...]
    memory: torch.Tensor

    def clear(self) -> None:
        """Set marks everywhere and zero the control words. Peers must not be calling."""
        self.memory.fill_(0xFF)
        self.memory[:CONTROL_BYTES] = 0

    def calls(self) -> int:
        """Calls counted so far; waits for the device."""
        return int(self._control()[0]) >> 20

    def check(self) -> None:
        """Raise PeerError if a wait of this rank has passed its limit; waits for the device."""
        code = int(self._control()[1])
        if code:
            raise PeerError(describe(code))

    def _control(self) -> torch.Tensor:
        return self.memory[:16].view(torch.int64).cpu()


def describe(code: int) -> str:
    """The sentence for an error word: call << 24 | phase << 16 | rank << 8 | peer."""
    call, phase = code >> 24, PHASES.get(code >> 16 & 0xFF, "unknown")
    rank, peer = code >> 8 & 0xFF, code & 0xFF
    return (
        f"rank {rank} waited for rank {peer} in phase {phase} of all-reduce {call} until the limit:"
        f" look for the process of rank {peer}, it died, hangs, or runs another sequence of calls."
    )


def local_world(layout: Layout, device: torch.device | str) -> Sequence[Workspace]:
    """Workspaces of all ranks in this process on one device: for tests and benches."""
    memory = torch.empty((layout.world, layout.size_bytes), dtype=torch.uint8, device=device)
    bases = tuple(memory[rank].data_ptr() for rank in range(layout.world))
    ranks = [Workspace(layout, rank, bases, memory[rank]) for rank in range(layout.world)]
    for workspace in ranks:
        workspace.clear()
    return ranks
