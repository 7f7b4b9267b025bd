"""Launching our all-reduce kernels: which geometries are admitted, and the call itself."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import msgspec
import torch

from fastverify.comm.layout import CONTROL_BYTES, ISLAND, MAX_PARTS, UNIT_BYTES, Layout
from fastverify.comm.workspace import Workspace

# A poll takes half to one microsecond on a GPU: four to eight seconds, later than any rank is.
POLL_LIMIT = 1 << 23
MAX_WARPS = 8
# Without a bound ptxas aims for occupancy and spills a few registers of kernels that need no
# occupancy; 8 warps of 255 registers are what a multiprocessor holds.
MAX_REGISTERS = 255


class Algorithm(IntEnum):
    """Our kernels. Append only: the numbers are in cached tables."""

    ONE_SHOT = 0
    TWO_SHOT = 1
    ISLAND = 2


class Launch(msgspec.Struct, frozen=True, order=True):
    """Geometry: parts a row (or an owner's slice of it) is cut into, one block per row and part."""

    algorithm: Algorithm
    parts: int

    @property
    def name(self) -> str:
        return f"{self.algorithm.name.lower()}_{self.parts}"


def width(launch: Launch, layout: Layout) -> int:
    """Units of a part: what one block adds up."""
    owners = {Algorithm.ONE_SHOT: 1, Algorithm.TWO_SHOT: layout.world, Algorithm.ISLAND: ISLAND}
    return layout.units // owners[launch.algorithm] // launch.parts


def why_not(launch: Launch, layout: Layout, rows: int, max_blocks: int) -> str | None:
    """Why this launch cannot take rows, or None when it can.

    max_blocks: blocks of one rank that surely run at the same time.
    """
    owners = {Algorithm.ONE_SHOT: 1, Algorithm.TWO_SHOT: layout.world, Algorithm.ISLAND: ISLAND}
    if not 1 <= rows <= layout.max_rows:
        return f"{rows} rows, planned for {layout.max_rows}"
    if not 1 <= launch.parts <= MAX_PARTS:
        return f"{launch.parts} parts, at most {MAX_PARTS}"
    if layout.units % (owners[launch.algorithm] * launch.parts):
        return f"a row of {layout.units} units has no {launch.parts} equal parts"
    if launch.algorithm is Algorithm.ISLAND and layout.world != 2 * ISLAND:
        return f"{layout.world} ranks, the island kernel needs 8"
    if launch.algorithm is Algorithm.ONE_SHOT:
        if rows * layout.world * layout.units * UNIT_BYTES > layout.half_bytes:
            return f"{rows} rows from {layout.world} ranks do not fit the slots"
        if launch.parts > 1 and rows * launch.parts > max_blocks:
            return f"{rows * launch.parts} parts wait for each other in {max_blocks} blocks"
    return None


def admitted(layout: Layout, rows: int, max_blocks: int) -> tuple[Launch, ...]:
    """Every launch worth measuring for rows: powers of two, and 7 for the width of DeepSeek."""
    launches = (Launch(a, parts) for a in Algorithm for parts in (1, 2, 4, 7, 8, 14, 16))
    return tuple(
        launch
        for launch in launches
        if why_not(launch, layout, rows, max_blocks) is None
        and rows * launch.parts <= max(rows, max_blocks)
    )


def ordered_peers(algorithm: Algorithm, rank: int, bases: tuple[int, ...]) -> tuple[int, ...]:
    """Addresses in the order in which the kernel of rank serves them; bases are in rank order."""
    world = len(bases)
    if algorithm is not Algorithm.ISLAND:
        return tuple(bases[(rank + 1 + step) % world] for step in range(world))
    place = rank % ISLAND
    mates = (rank - place + (place + 1 + step) % ISLAND for step in range(ISLAND))
    return (*(bases[mate] for mate in mates), bases[(rank + ISLAND) % world])


def constants(
    launch: Launch, layout: Layout, *, bf16: bool, fused: bool, fault: int = 0, stall: int = 0
) -> dict[str, Any]:
    """Compile-time arguments of the kernel.

    fault and stall are for tests: they take a protection out and pass time in a chosen place.
    """
    parts_of_row = launch.parts
    if launch.algorithm is not Algorithm.ONE_SHOT:
        parts_of_row *= ISLAND if launch.algorithm is Algorithm.ISLAND else layout.world
    # A tile has at least one lane per thread of a warp, so that no store happens twice.
    tile = max(32, _power_of_two(width(launch, layout)))
    return {
        "WORLD": layout.world,
        "UNITS": layout.units,
        "PARTS": launch.parts,
        "TILE": tile,
        "TAG_TILE": max(32, _power_of_two(parts_of_row)),
        "TAG_OFFSET": CONTROL_BYTES,
        "TAG_BYTES": layout.tag_bytes,
        "BF16": bf16,
        "FUSED": fused,
        "FAULT": fault,
        "STALL": stall,
    }


def warps(launch: Launch, layout: Layout) -> int:
    """Warps of a block: no more than its tile has lanes for."""
    tile = max(32, _power_of_two(width(launch, layout)))
    return min(MAX_WARPS, tile // 32)


@functools.cache
def kernel(algorithm: Algorithm) -> Any:
    """The Triton kernel; imported here because Triton reads its environment at import."""
    from fastverify.kernels.triton import ar_island, ar_one_shot, ar_two_shot

    return {
        Algorithm.ONE_SHOT: ar_one_shot.one_shot_kernel,
        Algorithm.TWO_SHOT: ar_two_shot.two_shot_kernel,
        Algorithm.ISLAND: ar_island.island_kernel,
    }[algorithm]


class Tensors(msgspec.Struct, frozen=True):
    """Tensors of a call. residual, weight and residual_out are None for a plain all-reduce."""

    x: Any
    out: Any
    residual: Any = None
    weight: Any = None
    residual_out: Any = None


def run(
    launch: Launch,
    workspace: Workspace,
    tensors: Tensors,
    *,
    eps: float = 0.0,
    max_blocks: int,
    limit: int = POLL_LIMIT,
    rows: int | None = None,
    **test: Any,
) -> None:
    """Launch one call on the current stream; nothing is checked here (see `why_not`).

    rows=0 loads the kernel without taking part. test: `fault`, `stall`, and `first` and `blocks`,
    which let one program stand for one block of a larger grid.
    """
    x = tensors.x
    rows = x.shape[0] if rows is None else rows
    layout = workspace.layout
    fused = tensors.residual is not None
    blocks = test.pop("blocks", None) or max(1, min(rows * launch.parts, max_blocks))
    first = test.pop("first", None)
    kernel(launch.algorithm)[(blocks if first is None else 1,)](
        x,
        tensors.residual if fused else x,
        tensors.weight if fused else x,
        tensors.out,
        tensors.residual_out if fused else tensors.out,
        ordered_peers(launch.algorithm, workspace.rank, workspace.bases),
        layout.slots,
        layout.half_bytes,
        workspace.rank,
        rows,
        first or 0,
        blocks,
        limit,
        eps,
        **constants(launch, layout, bf16=x.dtype == torch.bfloat16, fused=fused, **test),
        num_warps=warps(launch, layout),
        maxnreg=MAX_REGISTERS,
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
