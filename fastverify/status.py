"""The status table: what the plan requested, what runs, and why not. Pure."""

from __future__ import annotations

from fastverify.graphs import Runner
from fastverify.plan import LaunchPlan
from fastverify.reports import Active
from fastverify.show import PHASE_NAMES, spans

Row = tuple[str, str, str, str]


def rows(plan: LaunchPlan | None, active: Active) -> list[Row]:
    """Rows (what, requested, active, why not); plan is None outside our launcher."""
    on_cpu = active.device == "cpu"
    asked = plan.draft_lengths if plan else None
    drafts = "off" if active.drafts is None else f"{active.drafts} drafts a step"
    wanted = "-" if asked is None else f"{asked[0]} drafts a step" if asked else "off"
    found: list[Row] = [
        ("hooks", str(len(active.hooks)), str(len(active.hooks)), ""),
        ("speculation", wanted, drafts, _differs(wanted, drafts, "a flag of yours, or SGLang")),
    ]
    for phase in ("verify", "draft", "draft_extend") if active.drafts is not None else ("decode",):
        found.append(_graph_row(phase, plan, active.captured.get(phase), on_cpu))
    backend = plan.value("attention-backend") if plan else None
    found.append(("attention, target", backend or "-", active.attention["target"], ""))
    for phase in ("draft", "draft_extend"):
        if phase in active.attention:
            name = f"attention, {PHASE_NAMES[phase]}"
            found.append((name, "-", active.attention[phase], ""))
    asked_kernel = plan is not None and any(
        line.name == "FASTVERIFY_ATTENTION" for line in plan.environment
    )
    if active.kernel is not None or asked_kernel:
        found.append(
            ("MLA kernel", "fastverify" if asked_kernel else "-", active.kernel or "none", "")
        )
    found.append(("all-reduce", "-", active.all_reduce, ""))
    if on_cpu and active.drafts is not None:
        found.append(
            ("sampled verify", "-", "no", "on the CPU SGLang verifies greedily at any temperature")
        )
    if on_cpu:
        found.append(("times", "-", "meaningless", "this is the CPU"))
    return found


def _graph_row(phase: str, plan: LaunchPlan | None, runner: Runner | None, on_cpu: bool) -> Row:
    name = f"{PHASE_NAMES.get(phase, phase)} graphs"
    wanted = "-"
    reason = ""
    if plan:
        batches = {s.batch for s in plan.graphs.shapes if s.phase == phase}
        wanted = f"batch {spans(sorted(batches))}" if batches else "none"
        reason = next((e.reason for e in plan.graphs.exclusions if e.phase == phase), "")
    if runner is None:
        return (
            name,
            wanted,
            "none",
            "no graphs on the CPU" if on_cpu else reason or "not captured",
        )
    got = f"batch {spans(runner.batches)}"
    return (name, wanted, got, _differs(wanted, got, "SGLang clamps the list to its request pool"))


def _differs(wanted: str, got: str, reason: str) -> str:
    return "" if wanted in ("-", got) else reason
