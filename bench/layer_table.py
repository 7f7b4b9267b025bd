"""What measured parts add up to; pure functions of timings."""

from __future__ import annotations

import msgspec

from bench.layer_parts import (
    DENSE_PART,
    LAYER_PARTS,
    MOE_BLOCK,
    MOE_PARTS,
    OVERLAP,
    STEP_PARTS,
    UNATTRIBUTED,
)

CHECK_LIMIT = 0.05


class Timing(msgspec.Struct, frozen=True):
    """Median time of one call in us, its spread, and the same launched without a graph."""

    us: float
    spread_us: float = 0.0
    eager_us: float | None = None
    samples_us: list[float] = []


class Depth(msgspec.Struct, frozen=True):
    """Layers of the measured model: all of them, and how many are dense."""

    layers: int
    dense: int

    @property
    def moe(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense


class Cell(msgspec.Struct):
    """One attention backend, context and row count. failed: part -> reason."""

    attention: str
    context: int
    rows: int
    batch: int
    parts: dict[str, Timing] = {}
    step: Timing | None = None
    failed: dict[str, str] = {}
    parts_error: float | None = None
    graph_error: float | None = None
    distinct_experts: float | None = None


def parts_sum_us(parts: dict[str, float], depth: Depth) -> float | None:
    """Sum of the parts over one step, or None when a part is missing."""
    per_layer = [parts.get(name) for name in LAYER_PARTS]
    others = [parts.get(name) for name in (MOE_BLOCK, *STEP_PARTS)]
    dense = parts.get(DENSE_PART) if depth.dense else 0.0
    if dense is None or None in per_layer or None in others:
        return None
    moe_us, *step_us = (us for us in others if us is not None)
    layer_us = sum(us for us in per_layer if us is not None)
    return depth.layers * layer_us + depth.moe * moe_us + depth.dense * dense + sum(step_us)


def layer_us(cell: Cell, depth: Depth) -> dict[str, float]:
    """Time of each part in us per call, with the two rows that make the sum the whole.

    `moe_overlap` is the MoE block as captured, on two streams, less the sum of its parts one
    after the other: negative when the second stream hides time. `unattributed` is the rest of
    the step, divided by the layers.
    """
    times = {name: timing.us for name, timing in cell.parts.items()}
    out = {name: us for name, us in times.items() if name != MOE_BLOCK}
    if MOE_BLOCK in times and all(name in times for name in MOE_PARTS):
        out[OVERLAP] = times[MOE_BLOCK] - sum(times[name] for name in MOE_PARTS)
    total = parts_sum_us(times, depth)
    if total is not None and cell.step is not None:
        out[UNATTRIBUTED] = (cell.step.us - total) / depth.layers
    return out


def unattributed_share(cell: Cell, depth: Depth) -> float | None:
    """Part of the step that no part explains, from 0 to 1, signed; None when unknown."""
    per_layer = layer_us(cell, depth).get(UNATTRIBUTED)
    if per_layer is None or cell.step is None:
        return None
    return per_layer * depth.layers / cell.step.us


def scaled_step_us(cell: Cell, depth: Depth, full: Depth) -> float | None:
    """The step of a model of `full` depth from one measured at `depth`; None when unknown."""
    times = {name: timing.us for name, timing in cell.parts.items()}
    total = parts_sum_us(times, full)
    rest = layer_us(cell, depth).get(UNATTRIBUTED)
    return None if total is None or rest is None else total + rest * full.layers


def summary(cells: list[Cell], depth: Depth, full: Depth) -> dict[str, float]:
    """Flat names and numbers of one attention backend's cells for the result file."""
    out: dict[str, float] = {}
    for cell in cells:
        where = f"ctx{cell.context}.rows{cell.rows}"
        for part, us in layer_us(cell, depth).items():
            out[f"layer_us.{where}.{part}"] = round(us, 3)
        if cell.step is None:
            continue
        out[f"step_ms.{where}"] = round(cell.step.us / 1000, 4)
        if cell.step.eager_us is not None:
            out[f"eager_step_ms.{where}"] = round(cell.step.eager_us / 1000, 4)
        share = unattributed_share(cell, depth)
        if share is not None:
            out[f"unattributed_share.{where}"] = round(share, 4)
        scaled = scaled_step_us(cell, depth, full)
        if scaled is not None and full != depth:
            out[f"scaled_step_ms.{where}"] = round(scaled / 1000, 4)
    steps = {(c.context, c.rows): c.step.us for c in cells if c.step is not None}
    for (context, rows), us in steps.items():
        if rows == 3 and (context, 1) in steps:
            out[f"verify3_over_decode1.ctx{context}"] = round(us / steps[context, 1], 4)
    return out
