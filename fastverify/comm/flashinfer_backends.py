"""FlashInfer's two all-reduces for GPUs without NVLink, through their public interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastverify.comm.collective import Call, Collective, Fused, call_of
from fastverify.comm.layout import DTYPES, WORLDS
from fastverify.comm.unfused import AddNorm, Unfused
from fastverify.errors import ConfigError


class PcieIpc(Unfused):
    """`PcieIpcAllReduceWorkspace`, and a fused add + norm after it.

    Making it is collective. Its kernels wait for peers without a limit, so it must come after the
    peers have been proved.
    """

    name = "pcie_ipc"

    def __init__(
        self, group: dist.ProcessGroup, *, max_rows: int, hidden: int, add_norm: AddNorm
    ) -> None:
        from flashinfer.comm import PcieIpcAllReduceWorkspace

        self._add_norm = add_norm
        self._hidden = hidden
        self._max_rows = max_rows
        self._world = dist.get_world_size(group)
        if self._world not in WORLDS:
            raise ConfigError(f"pcie_ipc needs 2, 4 or 8 ranks, not {self._world}: use NCCL.")
        self._workspace: Any = PcieIpcAllReduceWorkspace(
            group=group, max_numel=max_rows * hidden, dtype=torch.bfloat16
        )
        self._admitted: dict[tuple[int, str], bool] = {}
        self._stream: torch.cuda.Stream | None = None

    def why_not(self, call: Call) -> str | None:
        if call.dtype not in DTYPES:
            return f"{call.dtype}, only {' and '.join(DTYPES)}"
        if call.hidden != self._hidden or not 1 <= call.rows <= self._max_rows:
            return f"{call.rows} x {call.hidden}, planned for {self._max_rows} x {self._hidden}"
        if not call.contiguous:
            return "a tensor is not contiguous"
        if not self._admitted.get((call.rows, call.dtype), False):
            return "not prepared, or FlashInfer has no kernel for it"
        return None

    def prepare(self, calls: Sequence[Call]) -> None:
        for dtype in sorted({call.dtype for call in calls}):
            shapes = sorted({(c.rows, c.hidden) for c in calls if c.dtype == dtype})
            found = self._workspace.prepare(shapes, dtype=getattr(torch, dtype))
            for (rows, _), config in found.items():
                self._admitted[rows, dtype] = config is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.why_not(call_of(x)):
            return None
        stream = torch.cuda.current_stream()
        if stream != self._stream:
            self._workspace.rebind_stream()
            self._stream = stream
        total: torch.Tensor = self._workspace.all_reduce(x)
        return total

    def close(self) -> None:
        self._workspace.destroy()


class Trtllm(Collective):
    """TensorRT-LLM's fused one-shot all-reduce as FlashInfer builds it (SM90, SM100, SM12x)."""

    name = "trtllm"

    def __init__(self, group: dist.ProcessGroup, *, max_rows: int, hidden: int) -> None:
        from flashinfer import comm

        self._comm: Any = comm
        self._hidden = hidden
        self._max_rows = max_rows
        self._workspace: Any = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=dist.get_world_size(group),
            rank=dist.get_rank(group),
            max_token_num=max_rows,
            hidden_dim=hidden,
            dtype=torch.bfloat16,
            group=group,
        )

    def why_not(self, call: Call) -> str | None:
        if call.dtype not in DTYPES:
            return f"{call.dtype}, only {' and '.join(DTYPES)}"
        if call.hidden != self._hidden or not 1 <= call.rows <= self._max_rows:
            return f"{call.rows} x {call.hidden}, planned for {self._max_rows} x {self._hidden}"
        return None if call.contiguous else "a tensor is not contiguous"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.why_not(call_of(x)):
            return None
        out = torch.empty_like(x)
        self._comm.allreduce_fusion(
            input=x,
            workspace=self._workspace,
            pattern=self._comm.AllReduceFusionPattern.kAllReduce,
            output=out,
            use_oneshot=True,
            fp32_acc=True,
        )
        return out

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        if self.why_not(call_of(x, residual, weight)):
            return None
        out, new = torch.empty_like(x), torch.empty_like(x)
        self._comm.allreduce_fusion(
            input=x,
            workspace=self._workspace,
            pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=new,
            norm_out=out,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=True,
            fp32_acc=True,
        )
        return out, new

    def close(self) -> None:
        self._workspace.destroy()
