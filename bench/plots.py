"""Pictures for the docs: where a layer's time goes, and what an accept length is worth."""

from __future__ import annotations

import pathlib
from typing import Any

from bench.layer_parts import PART_NAMES

# One colour a part, from the Okabe-Ito and Tol palettes, in the order of a step.
COLOURS = {
    "input_norm": "#bbbbbb",
    "qkv_proj": "#0072b2",
    "attention": "#d55e00",
    "out_proj": "#56b4e9",
    "attn_norm": "#999999",
    "router": "#f0e442",
    "experts": "#009e73",
    "shared_expert": "#66c2a5",
    "moe_add": "#c7e9c0",
    "moe_overlap": "#000000",
    "unattributed": "#cc79a7",
}
LAYER_ROWS = tuple(name for name in PART_NAMES if name in COLOURS)


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure with panels side by side, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=(width, height), layout="constrained", squeeze=False
    )
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a figure as PNG and release it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def stack(axes: Any, bars: dict[str, dict[str, float]]) -> None:
    """Stacked bars of parts in us by label; negative parts hang below zero."""
    labels = list(bars)
    up, down = [0.0] * len(labels), [0.0] * len(labels)
    for part in LAYER_ROWS:
        heights = [bars[label].get(part, 0.0) for label in labels]
        base = [u if h >= 0 else d for u, d, h in zip(up, down, heights, strict=True)]
        axes.bar(labels, heights, 0.72, bottom=base, color=COLOURS[part], label=part)
        up = [u + max(h, 0.0) for u, h in zip(up, heights, strict=True)]
        down = [d + min(h, 0.0) for d, h in zip(down, heights, strict=True)]
    for x, (top, below) in enumerate(zip(up, down, strict=True)):
        axes.annotate(f"{top + below:.0f}", (x, top), ha="center", va="bottom", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.tick_params(axis="x", labelrotation=60, labelsize=8)


def layer_bars(
    panels: dict[str, dict[str, dict[str, float]]], title: str, path: pathlib.Path
) -> pathlib.Path:
    """Where one MoE layer's time goes: a panel for each context, each with its own scale.

    panels: context -> label -> part -> us. A black bar below zero is time that the second stream
    hides; the number on a bar is the sum.
    """
    bars = max(len(panel) for panel in panels.values())
    width = 1.8 + len(panels) * max(1.6, 0.5 * bars + 0.6)
    figure, axes = new_figure(width, 4.8, len(panels))
    for one, (context, panel) in zip(axes, panels.items(), strict=True):
        stack(one, panel)
        one.set_title(context, fontsize=9)
    axes[0].set_ylabel("us per layer")
    figure.suptitle(title, fontsize=10)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], frameon=False, fontsize=8, loc="outside right center")
    return save(figure, path)


def accept_lines(
    lines: dict[str, dict[float, float]], baseline_tok_s: float, title: str, path: pathlib.Path
) -> pathlib.Path:
    """Tokens per second by accept length, with the speed of plain decode to beat.

    lines: label -> accept length -> tok/s. Each crossing of the baseline is its break-even.
    """
    figure, (axes,) = new_figure(7.0, 4.4)
    for label, points in lines.items():
        xs = sorted(points)
        axes.plot(xs, [points[x] for x in xs], marker="o", markersize=3.5, label=label)
    axes.axhline(baseline_tok_s, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"plain decode, {baseline_tok_s:.0f} tok/s",
        (0.99, baseline_tok_s), xycoords=("axes fraction", "data"),
        ha="right", va="bottom", fontsize=8,
    )  # fmt: skip
    axes.set_xlabel("accept length (tokens a verify step)")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return save(figure, path)
