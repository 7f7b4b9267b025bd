"""Our kernels behind the interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastverify.comm import launch as ar
from fastverify.comm.collective import Call, Collective, Fused, call_of
from fastverify.comm.layout import DTYPES
from fastverify.comm.workspace import Workspace

# Blocks of one rank that run at once on any GPU this serves, beside a draft's or copy's kernel.
MAX_BLOCKS = 64


class Peer(Collective):
    """One launch geometry of our kernels, so that each is a contender of its own.

    workspace: shared by all Peers of a rank; `close` is called once, by the last of them.
    Calls may move to another stream (capture, then replay): the new stream then waits for the
    old one. Calls on two streams at once are a misuse that nothing here can see.
    """

    def __init__(
        self,
        launch: ar.Launch,
        workspace: Workspace,
        *,
        max_blocks: int = MAX_BLOCKS,
        limit: int = ar.POLL_LIMIT,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.name = f"fastverify.{launch.name}"
        self.launch = launch
        self._workspace = workspace
        self._max_blocks = max_blocks
        self._limit = limit
        self._close = close
        self._stream: torch.cuda.Stream | None = None

    def why_not(self, call: Call) -> str | None:
        layout = self._workspace.layout
        if call.dtype not in DTYPES:
            return f"{call.dtype}, only {' and '.join(DTYPES)}"
        if call.hidden != layout.hidden:
            return f"hidden {call.hidden}, planned for {layout.hidden}"
        if not call.contiguous:
            return "a tensor is not contiguous"
        return ar.why_not(self.launch, layout, call.rows, self._max_blocks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.why_not(call_of(x)) is not None:
            return None
        out = torch.empty_like(x)
        self._run(ar.Tensors(x, out), x.numel() // x.shape[-1])
        return out

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        call = call_of(x, residual, weight)
        if self.why_not(call) is not None:
            return None
        out, new = torch.empty_like(x), torch.empty_like(x)
        self._run(ar.Tensors(x, out, residual, weight, new), call.rows, eps)
        return out, new

    def prepare(self, calls: Sequence[Call]) -> None:
        device = self._workspace.memory.device
        for dtype, fused in sorted({(call.dtype, call.fused) for call in calls}):
            x = torch.empty(
                (1, self._workspace.layout.hidden), dtype=getattr(torch, dtype), device=device
            )
            row = x[0] if fused else None
            residual = x if fused else None
            self._run(ar.Tensors(x, torch.empty_like(x), residual, row, torch.empty_like(x)), 0)
        if device.type == "cuda":
            # A kernel is loaded when it first runs, and loading waits for kernels that spin.
            torch.cuda.synchronize(device)

    def check(self) -> None:
        self._workspace.check()

    def close(self) -> None:
        if self._close is not None:
            self._close()

    def _run(self, tensors: ar.Tensors, rows: int, eps: float = 0.0) -> None:
        if self._workspace.memory.is_cuda:
            self._follow_stream()
        ar.run(
            self.launch,
            self._workspace,
            tensors,
            eps=eps,
            rows=rows,
            max_blocks=self._max_blocks,
            limit=self._limit,
        )

    def _follow_stream(self) -> None:
        stream = torch.cuda.current_stream()
        moved = self._stream is not None and stream != self._stream
        if moved and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream
