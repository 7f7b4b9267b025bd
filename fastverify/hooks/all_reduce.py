"""Plain all-reduces of the tensor-parallel group, and the collective of this process.

On a GPU the collective is made before graphs are captured, from what the start measured. On the
CPU it is the reference, made at the first call, so that the wiring runs where CI can see it.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from fastverify.comm.build import Wanted, build
from fastverify.comm.choice import describe
from fastverify.comm.collective import Collective, call_of
from fastverify.comm.probe import Proof
from fastverify.comm.reference import Reference
from fastverify.hooks.registry import Hook

logger = logging.getLogger("fastverify")
GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
RUNNER = "sglang.srt.model_executor.runner.base_runner.BaseRunner"
METHOD = "fastverify"
# Names of the one group that all sums of a layer go over: no data-parallel attention, no EP.
GROUP_NAME = "tp:0"

Build = Callable[[Any], Collective | None]


def builder(
    widths: Sequence[int],
    proof: Proof,
    facts: Mapping[str, str],
    *,
    cache: pathlib.Path | None = None,
    forced: str | None = None,
) -> Build:
    """A `Build` for a server: measures what its graphs will ask for, in SGLang's groups.

    widths: rows a request has in a verify step, one for each draft length that can occur. Memory
    is sized for the largest; batches past 64 rows stay with NCCL.
    """

    def build_for(runner: Any) -> Collective | None:
        from sglang.srt.model_executor.runner.base_cuda_graph_runner import (
            get_batch_sizes_to_capture,
        )

        batches, _ = get_batch_sizes_to_capture(runner, max(widths))
        group = runner.tp_group
        wanted = Wanted(
            hidden=int(runner.model_config.hidden_size),
            dtype=str(runner.dtype).removeprefix("torch."),
            verify=tuple(sorted({batch * width for batch in batches for width in (1, *widths)})),
            draft=tuple(sorted({batch * width for batch in batches for width in (1, *widths)})),
            proof=proof,
            facts=dict(facts),
            forced=forced,
        )
        built = build(wanted, group.cpu_group, group.device_group, group.device, cache=cache)
        if built is None:
            return None
        for name, reason in built.missing.items():
            logger.info("fastverify: all-reduce %s is not there: %s", name, reason)
        for line in describe(built.table.rows):
            logger.info("fastverify: all-reduce %s", " | ".join(line))
        return built.collective

    return build_for


class AllReduce:
    """The hooks on `GroupCoordinator`, and `active()`, which the norm hooks ask.

    build: makes the collective from SGLang's first model runner, on all ranks together, before
    capture; None there leaves every all-reduce to SGLang. taken: calls that we completed.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._collective: Collective | None = None
        self._built = False
        self.taken = 0

    def active(self) -> Collective | None:
        """The collective of this process, None until it is made."""
        if self._collective is None and not self._built:
            self._make_reference()
        return self._collective

    def hooks(self) -> tuple[Hook, ...]:
        return (
            Hook(f"{GROUP}.all_reduce", self.around_all_reduce, HookType.AROUND),
            Hook(
                f"{GROUP}._resolve_outplace_all_reduce_method",
                self.around_resolve,
                HookType.AROUND,
            ),
            Hook(f"{GROUP}._all_reduce_out_place", self.around_out_place, HookType.AROUND),
            Hook(
                f"{RUNNER}._pre_initialize_pcie_ipc_workspace",
                self.after_workspaces,
                HookType.AFTER,
            ),
        )

    def around_all_reduce(
        self, original: Callable[..., torch.Tensor], group: Any, x: torch.Tensor
    ) -> torch.Tensor:
        """AROUND `all_reduce(input_)`: only the CPU, whose branch asks no method below it."""
        if x.is_cpu and group.world_size > 1 and group.unique_name == GROUP_NAME:
            total = self._take(x)
            if total is not None:
                return total
        return original(group, x)

    def around_resolve(
        self, original: Callable[..., Any], group: Any, input_: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        """AROUND `_resolve_outplace_all_reduce_method(input_, should_use_pymscclpp_allreduce)`."""
        if group.unique_name == GROUP_NAME and self._supports(input_):
            return METHOD
        return original(group, input_, *args, **kw)

    def around_out_place(
        self,
        original: Callable[..., torch.Tensor],
        group: Any,
        input_: torch.Tensor,
        outplace_all_reduce_method: str,
    ) -> torch.Tensor:
        """AROUND `_all_reduce_out_place(input_, method)`; `auto` is what Dynamo's graphs hold."""
        mine = outplace_all_reduce_method == METHOD or (
            outplace_all_reduce_method == "auto" and group.unique_name == GROUP_NAME
        )
        total = self._take(input_) if mine else None
        if total is not None:
            return total
        if outplace_all_reduce_method == METHOD:
            outplace_all_reduce_method = "pynccl"
        return original(group, input_, outplace_all_reduce_method)

    def after_workspaces(self, result: Any, runner: Any) -> None:
        """AFTER `_pre_initialize_pcie_ipc_workspace()`, once per model runner; the first builds."""
        if not self._built:
            self._built = True
            self._collective = self._build(runner.model_runner)

    def _supports(self, x: torch.Tensor) -> bool:
        collective = self.active()
        return collective is not None and x.dim() >= 2 and collective.supports(call_of(x))

    def _take(self, x: torch.Tensor) -> torch.Tensor | None:
        collective = self.active()
        if collective is None or not self._supports(x):
            return None
        total = collective.all_reduce(x)
        self.taken += total is not None
        return total

    def _make_reference(self) -> None:
        from sglang.srt.runtime_context import get_parallel

        group = get_parallel().tp_group
        if group.world_size > 1 and group.device.type == "cpu":
            self._collective = Reference(group.device_group)
            self._built = True
