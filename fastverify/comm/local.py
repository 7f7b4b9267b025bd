"""All ranks of a collective on one GPU, each on its own stream: for tests and benches.

Two rules make this safe. Parallel branches of one graph may run one after the other, so each rank
has a graph of its own. And loading a kernel waits for the device, so every kernel is loaded, by a
call of no rows, before the first rank waits for another. Replays are enqueued behind a gate, a
kernel that keeps the GPU busy until all ranks are in their streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastverify.comm import launch as ar
from fastverify.comm.layout import Layout
from fastverify.comm.workspace import Workspace, local_world

GATE_CYCLES = 4_000_000
# Of one multiprocessor, on every GPU since Volta.
REGISTERS = 65536


def allow_many_streams() -> None:
    """Give each stream a hardware queue of its own; call before the first use of CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class LocalRanks:
    """The ranks: workspaces and streams. Calls of one rank run in order, ranks side by side."""

    def __init__(self, layout: Layout, device: str = "cuda") -> None:
        self.layout = layout
        self.workspaces: Sequence[Workspace] = local_world(layout, device)
        self.streams = [torch.cuda.Stream() for _ in range(layout.world)]
        self._gate = torch.cuda.Stream()
        properties = torch.cuda.get_device_properties(device)
        self._processors = int(properties.multi_processor_count)
        torch.cuda.synchronize()

    def max_blocks(self, launch: ar.Launch) -> int:
        """Blocks a rank may use so that those of all ranks surely run at once, by registers."""
        threads = 32 * ar.warps(launch, self.layout)
        resident = REGISTERS // (ar.MAX_REGISTERS * threads)
        return self._processors * resident // self.layout.world

    def call(self, rank: int, launch: ar.Launch, tensors: ar.Tensors, **options: Any) -> None:
        """One call of one rank on the current stream."""
        options.setdefault("max_blocks", self.max_blocks(launch))
        ar.run(launch, self.workspaces[rank], tensors, **options)

    def load(self, launch: ar.Launch, tensors: ar.Tensors, **options: Any) -> None:
        """Compile and load what `call` needs for tensors like these, without taking part."""
        self.call(0, launch, tensors, rows=0, **options)
        torch.cuda.synchronize()

    def together(self, body: Callable[[int], None]) -> float:
        """Run `body(rank)` of every rank on its stream, all behind the gate.

        Returns the time from the opening of the gate to the end of the last rank, in us.
        """
        torch.cuda.synchronize()
        opened = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in self.streams]
        with torch.cuda.stream(self._gate):
            torch.cuda._sleep(GATE_CYCLES)
            opened.record()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                stream.wait_event(opened)
                body(rank)
                ends[rank].record()
        torch.cuda.synchronize()
        return max(float(opened.elapsed_time(end)) for end in ends) * 1000.0

    def capture(self, body: Callable[[int], None]) -> list[torch.cuda.CUDAGraph]:
        """One graph a rank of what `body(rank)` launches; nothing runs."""
        graphs = []
        for rank, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                body(rank)
            graphs.append(graph)
        torch.cuda.synchronize()
        return graphs

    def check(self) -> None:
        """Raise the first PeerError of any rank."""
        for workspace in self.workspaces:
            workspace.check()

    def clear(self) -> None:
        """Make the workspaces usable again after an error."""
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.clear()
        torch.cuda.synchronize()
