"""The tables that `bench.verify_latency` prints."""

from __future__ import annotations

from collections.abc import Iterator

from bench import layer_table
from bench.layer_parts import PART_NAMES
from bench.layer_table import Cell, Depth


def where(cell: Cell) -> tuple[str, int]:
    """Backend and context, the order of the tables."""
    return cell.attention, cell.context


def print_tables(cells: list[Cell], depth: Depth, declined: dict[str, str]) -> None:
    """Per backend and context: parts by row count, in us per layer, and what failed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    for name, context in dict.fromkeys((c.attention, c.context) for c in sorted(cells, key=where)):
        own = {c.rows: c for c in cells if (c.attention, c.context) == (name, context) and c.parts}
        if not own:
            continue
        table = Table(title=f"{name}, context {context}: us per call (graph / eager)")
        table.add_column("part")
        for rows in sorted(own):
            table.add_column(f"{rows} rows", justify="right")
        for part in PART_NAMES:
            table.add_row(part, *(part_text(own[r], part, depth) for r in sorted(own)))
        table.add_row("step, ms", *(step_text(own[r]) for r in sorted(own)))
        console.print(table)
    for name, why in declined.items():
        console.print(f"{name}: {why}")
    for line in failures(cells):
        console.print(line)


def part_text(cell: Cell, part: str, depth: Depth) -> str:
    """One table entry: graph time and, where it was launched by itself, eager time."""
    us = layer_table.layer_us(cell, depth).get(part)
    if us is None:
        return "failed" if part in cell.failed else "-"
    timing = cell.parts.get(part)
    eager = f" / {timing.eager_us:.0f}" if timing and timing.eager_us is not None else ""
    return f"{us:.1f}{eager}"


def step_text(cell: Cell) -> str:
    """The step in ms, graph and eager."""
    if cell.step is None:
        return "failed"
    eager = f" / {cell.step.eager_us / 1000:.1f}" if cell.step.eager_us is not None else ""
    return f"{cell.step.us / 1000:.2f}{eager}"


def failures(cells: list[Cell]) -> Iterator[str]:
    """`failed: reason` lines, each reason once with the number of cells it hit."""
    seen: dict[str, list[Cell]] = {}
    for cell in cells:
        for part, why in cell.failed.items():
            seen.setdefault(f"{cell.attention} {part} failed: {why}", []).append(cell)
    for line, hit in seen.items():
        yield f"{line} ({len(hit)} cells, first at context {hit[0].context}, {hit[0].rows} rows)"
