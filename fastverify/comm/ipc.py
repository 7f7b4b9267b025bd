"""One workspace per process, its memory mapped by all ranks of a node through CUDA IPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastverify.comm.agreement import agree, require_same
from fastverify.comm.layout import Layout
from fastverify.comm.workspace import PeerError, Workspace


class IpcWorld:
    """This rank's workspace and the mappings behind it. Made and closed by all ranks together.

    The memory comes from cudaMalloc and not from torch, so torch's expandable segments, which
    CUDA IPC cannot export, do not matter. Setting up is one transaction: a rank that fails says
    so at the next exchange, and PeerError is raised on every rank.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._own: Any = None
        self._opened: list[Any] = []
        rank = dist.get_rank(group)
        require_same(group, layout, "plans of peer memory")
        try:
            handles = agree(group, lambda: self._allocate(layout, device), "allocate peer memory")
            bases = agree(group, lambda: self._map(handles, rank), "map the peers' memory")
        except PeerError:
            self._release()
            raise
        memory = view_bytes(bases[rank][rank], layout.size_bytes, device)
        self.workspace = Workspace(layout, rank, tuple(bases[rank]), memory)
        self.workspace.clear()
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def close(self) -> None:
        """Unmap and free, once no rank can be in a call any more."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
        self._release()

    def _allocate(self, layout: Layout, device: torch.device) -> bytes:
        from flashinfer.comm.cuda_ipc import cudart

        torch.cuda.set_device(device)
        torch.cuda.current_stream()  # makes the context, and torch load the runtime library
        self._own = cudart.cudaMalloc(layout.size_bytes)
        return bytes(cudart.cudaIpcGetMemHandle(self._own))

    def _map(self, handles: Sequence[bytes], rank: int) -> list[int]:
        from flashinfer.comm.cuda_ipc import cudaIpcMemHandle_t, cudart

        bases = []
        for peer, handle in enumerate(handles):
            if peer == rank:
                bases.append(int(self._own.value))
                continue
            opened = cudart.cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(handle))
            self._opened.append(opened)
            bases.append(int(opened.value))
        return bases

    def _release(self) -> None:
        from flashinfer.comm.cuda_ipc import cudart

        for opened in self._opened:
            cudart.cudaIpcCloseMemHandle(opened)
        self._opened.clear()
        if self._own is not None:
            cudart.cudaFree(self._own)
            self._own = None


def view_bytes(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory that torch did not allocate, as bytes; the caller keeps it alive."""

    class Memory:
        __cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)
