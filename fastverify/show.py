"""How plans and status reach the reader: rich tables on a terminal, plain text when piped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from fastverify.graphs import CapturePlan
from fastverify.plan import LaunchPlan, Line

COLOURS = {"info": "cyan", "unknown": "magenta", "warn": "yellow", "fail": "red"}
PHASE_NAMES = {"verify": "verify", "draft": "draft", "draft_extend": "draft-extend"}


def plan_text(plan: LaunchPlan) -> str:
    """The plan as plain text: no colours, no width limit, stable for golden files."""
    parts = [plan.title, f"machine: {plan.machine}", ""]
    for heading, lines in _sections(plan):
        parts.append(heading)
        width = max((len(name) + len(value) + 1 for name, value, _, _ in lines), default=0)
        for name, value, source, reason in lines:
            parts.append(f"  {f'{name} {value}'.rstrip():<{min(width, 76)}}  [{source}] {reason}")
        parts.append("")
    parts += [f"{finding.severity}: {finding.text}" for finding in plan.findings]
    return "\n".join(parts).rstrip() + "\n"


def _sections(plan: LaunchPlan) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    def rows(lines: Iterable[Line], dash: str) -> list[tuple[str, str, str, str]]:
        return [(dash + line.name, line.value, line.source, line.reason) for line in lines]

    padded = "a batch in between is padded up to the next"
    graphs = [(*row, "fastverify", padded) for row in graph_rows(plan.graphs)]
    left_out = [
        (PHASE_NAMES.get(e.phase, e.phase), "no graph", "fastverify", e.reason)
        for e in plan.graphs.exclusions
    ]
    return [
        ("SGLang arguments", rows(plan.arguments, "--")),
        ("environment", rows(plan.environment, "")),
        ("graphs", graphs + left_out),
    ]


def graph_rows(graphs: CapturePlan) -> list[tuple[str, str]]:
    """(phase, rows and batches) of each group of captured graphs."""
    groups: dict[tuple[str, int], list[int]] = {}
    for shape in graphs.shapes:
        groups.setdefault((shape.phase, shape.rows), []).append(shape.batch)
    return [
        (
            PHASE_NAMES.get(phase, phase),
            f"{rows} row{'s' * (rows > 1)} a request, batch {spans(batches)}",
        )
        for (phase, rows), batches in groups.items()
    ]


def spans(numbers: Sequence[int]) -> str:
    """1,2,3,4,6 -> '1-4, 6'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def print_plan(plan: LaunchPlan, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Print the plan: JSON, a rich table on a terminal, or plain text."""
    out = stream or sys.stdout
    if as_json:
        body = msgspec.json.format(msgspec.json.encode(plan), indent=1)
        out.write(body.decode() + "\n")
    elif out.isatty():
        console = Console(file=out)
        console.print(f"[bold]{plan.title}[/bold]\nmachine: {plan.machine}")
        for heading, lines in _sections(plan):
            console.print(table(heading, ("name", "value", "from", "why"), lines))
        for finding in plan.findings:
            colour = COLOURS[finding.severity]
            console.print(f"[{colour}]{finding.severity}:[/{colour}] {finding.text}")
    else:
        out.write(plan_text(plan))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A rich table whose cells are printed literally."""
    made = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(cell.replace("[", "\\[") for cell in row))
    return made


def print_status(rows: Sequence[tuple[str, str, str, str]], stream: TextIO | None = None) -> None:
    """Print the status table: what, requested, active, why not."""
    out = stream or sys.stderr
    columns = ("what", "requested", "active", "why not")
    if out.isatty():
        Console(file=out).print(table("fastverify status", columns, rows))
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(3)]
    out.write("fastverify status\n")
    for row in (columns, *rows):
        cells = (*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])
        out.write("  " + "  ".join(cells).rstrip() + "\n")
    out.flush()
