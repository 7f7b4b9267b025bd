"""What really runs, read from the scheduler once it is ready to serve."""

from __future__ import annotations

import logging
import pathlib
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

from fastverify import reports, status
from fastverify.hooks.registry import Hook
from fastverify.hooks.verify import runner_facts

if TYPE_CHECKING:
    from fastverify.hooks.attention import VerifyAttention

logger = logging.getLogger("fastverify")


def hook(
    folder: pathlib.Path | None, hooks: tuple[str, ...], kernel: VerifyAttention | None
) -> Hook:
    """AFTER `Scheduler.get_init_info`: the last thing a scheduler does before it serves."""

    def after_init_info(result: Any, scheduler: Any) -> None:
        parallel = get_parallel()
        if parallel.tp_rank != 0 or not parallel.pp_group.is_last_rank:
            return
        facts = active(scheduler, hooks, kernel)
        if folder is None:
            for row in status.rows(None, facts):
                logger.info("fastverify: %s", " | ".join(row))
        else:
            reports.write(folder, "active.json", facts)

    return Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info", after_init_info, HookType.AFTER
    )


def active(
    scheduler: Any, hooks: tuple[str, ...], kernel: VerifyAttention | None
) -> reports.Active:
    """The facts of a ready scheduler: attention classes, captured graphs, all-reduce."""
    target = scheduler.tp_worker.model_runner
    attention = {"target": _name(target.attn_backend)}
    runners: dict[str, Any] = {}
    worker = scheduler.draft_worker
    if worker is None:
        runners["decode"] = target.decode_cuda_graph_runner
    else:
        draft = worker.draft_worker
        runners["verify"] = target.decode_cuda_graph_runner
        runners["draft"] = getattr(draft, "cuda_graph_runner", None)
        runners["draft_extend"] = getattr(draft, "cuda_graph_runner_for_draft_extend", None)
        attention["draft"] = _name(getattr(draft, "draft_attn_backend", None))
        attention["draft_extend"] = _name(getattr(draft, "draft_extend_attn_backend", None))
    captured = {phase: runner_facts(runner) for phase, runner in runners.items()}
    return reports.Active(
        device=str(target.device),
        tp=int(get_parallel().tp_size),
        drafts=int(worker.speculative_num_steps) if worker is not None else None,
        attention=attention,
        captured={phase: facts for phase, facts in captured.items() if facts is not None},
        hooks=hooks,
        all_reduce=_all_reduce(target),
        kernel=kernel.describe() if kernel else None,
    )


def _name(backend: Any) -> str:
    return type(backend).__name__ if backend is not None else "none"


def _all_reduce(runner: Any) -> str:
    group = get_parallel().tp_group
    if group.world_size == 1:
        return "none needed"
    if str(runner.device) == "cpu":
        return "gloo"
    pcie = getattr(group, "pcie_ipc_comm", None)
    custom = getattr(group, "ca_comm", None)
    if custom is not None and not custom.disabled:
        return "SGLang custom"
    return "FlashInfer PCIe-IPC" if pcie is not None and not pcie.disabled else "NCCL"
