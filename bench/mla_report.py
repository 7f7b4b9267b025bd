"""Tables and the picture of the MLA verify results, for `bench.report`."""

from __future__ import annotations

import pathlib
import re
from typing import Any

Body = dict[str, Any]
US_KEY = re.compile(r"us\.ctx(\d+)\.rows(\d+)(?:\.batch(\d+))?\.(\w+)")
MS_KEY = re.compile(r"iteration_ms\.ctx(\d+)\.([\w-]+)")
LABELS = {
    "fastverify": "fastverify",
    "flashinfer_fa3": "FlashInfer fa3",
    "flashinfer_fa2": "FlashInfer fa2",
    "triton": "SGLang triton",
}


def kernel_cells(body: Body) -> dict[tuple[int, int, int], dict[str, float]]:
    """(rows, batch, context) -> contender -> us."""
    cells: dict[tuple[int, int, int], dict[str, float]] = {}
    for key, us in body["summary"].items():
        if match := US_KEY.fullmatch(key):
            context, rows, batch, name = match.groups()
            if name in LABELS:
                cells.setdefault((int(rows), int(batch or 1), int(context)), {})[name] = us
    return cells


def kernel_rows(body: Body) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the kernel table: us per layer by rows, batch and context."""
    lines = [
        [
            f"{rows} rows, batch {batch}",
            str(context),
            *(f"{cell[name]:.1f}" if name in cell else "-" for name in LABELS),
        ]
        for (rows, batch, context), cell in sorted(kernel_cells(body).items())
    ]
    return ["us per layer", "context", *LABELS.values()], lines


def served_cells(bodies: list[Body]) -> dict[str, dict[int, float]]:
    """backend -> context -> ms per iteration, over all results."""
    cells: dict[str, dict[int, float]] = {}
    for body in bodies:
        for key, ms in body["summary"].items():
            if match := MS_KEY.fullmatch(key):
                cells.setdefault(match[2], {})[int(match[1])] = ms
    return cells


def served_rows(bodies: list[Body]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the served table: ms per iteration by backend and context."""
    cells = served_cells(bodies)
    contexts = sorted({context for by in cells.values() for context in by})
    lines = [
        [LABELS.get(name, name), *(f"{by[c]:.1f}" if c in by else "-" for c in contexts)]
        for name, by in sorted(cells.items())
    ]
    return ["ms per iteration", *map(str, contexts)], lines


def draw(kernel: Body, served: list[Body], path: pathlib.Path) -> pathlib.Path:
    """Attention by context on the left, a served iteration by context on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    cells = kernel_cells(kernel)
    for name, label in LABELS.items():
        points = [(c, cell[name]) for (r, b, c), cell in sorted(cells.items())
                  if (r, b) == (4, 1) and name in cell]  # fmt: skip
        left.plot(*zip(*points, strict=True), "o-", label=label)
    left.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="us per layer")
    left.set_title("verify attention, 4 rows, 8 heads, batch 1")
    for name, by in served_cells(served).items():
        right.plot(*zip(*sorted(by.items()), strict=True), "o-", label=LABELS.get(name, name))
    right.set(xscale="log", xlabel="context, tokens", ylabel="ms per iteration")
    right.set_ylim(bottom=0)
    right.set_title("served iteration, 6 layers, 3 drafts, batch 1")
    for axes in (left, right):
        axes.grid(True, which="both", alpha=0.25)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path
