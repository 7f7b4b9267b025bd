"""MLA verify configurations worth measuring, most promising first."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fastverify.attention.plan import KernelConfig, KvDtype

HEADS = 8
# A larger tile (16 heads x 8 rows) uses the configuration of 64, twice.
TILE_ROWS = (32, 64, 16)
DEFAULTS = {
    "min_split_tokens": 64, "merge_columns": 128, "merge_splits": 64, "merge_warps": 4,
}  # fmt: skip
SPLIT_SETTINGS = (
    {"min_split_tokens": 32}, {"min_split_tokens": 128}, {"min_split_tokens": 256},
)  # fmt: skip
MERGE_SETTINGS = (
    {"merge_splits": 128}, {"merge_splits": 128, "merge_warps": 8}, {"merge_columns": 64},
    {"merge_columns": 64, "merge_splits": 128}, {"merge_columns": 256, "merge_splits": 32},
    {"merge_columns": 256, "merge_splits": 64, "merge_warps": 8}, {"merge_warps": 8},
    {"merge_columns": 64, "merge_splits": 256, "merge_warps": 8},
)  # fmt: skip

# body, block_m, block_n, chunks, warps, stages, programs_per_sm
Line: TypeAlias = tuple[Literal["wide", "chunked", "wgmma"], int, int, int, int, int, int]

WGMMA: tuple[Line, ...] = (
    ("wgmma", 64, 64, 2, 8, 2, 1),
    ("wgmma", 64, 64, 1, 8, 2, 1),
    ("wgmma", 64, 32, 1, 8, 4, 1),
    ("wgmma", 64, 32, 2, 8, 4, 1),
    ("wgmma", 64, 32, 1, 8, 3, 1),
)
# Shapes for mma.sync by the block_m they suit; wgmma always fills 64 lines.
MMA_SYNC: dict[int, tuple[Line, ...]] = {
    16: (
        ("wide", 16, 32, 1, 4, 3, 2),
        ("chunked", 16, 32, 4, 4, 3, 2),
        ("chunked", 16, 16, 4, 4, 3, 2),
        ("wide", 16, 16, 1, 4, 4, 2),
        ("wide", 16, 32, 1, 4, 2, 3),
        ("wide", 16, 64, 1, 8, 3, 1),
    ),
    32: (
        ("wide", 32, 16, 1, 4, 4, 2),
        ("wide", 32, 16, 1, 4, 3, 2),
        ("wide", 32, 32, 1, 4, 3, 2),
        ("wide", 32, 32, 1, 8, 3, 1),
        ("wide", 32, 32, 1, 8, 4, 1),
        ("chunked", 32, 32, 8, 8, 3, 1),
        ("chunked", 32, 16, 8, 8, 3, 1),
    ),
    64: (
        ("wide", 64, 32, 1, 8, 4, 1),
        ("wide", 64, 32, 1, 8, 3, 1),
    ),
}  # fmt: skip


def candidates(arch: str, tile_rows: int | None = None, kv: KvDtype = "bf16") -> list[KernelConfig]:
    """Bodies worth measuring for a tile of rows x heads; None: for every tile."""
    if tile_rows is None:
        return [c for tile in sorted(TILE_ROWS) for c in candidates(arch, tile, kv)]
    lines = list(MMA_SYNC[min(tile_rows, 32)])
    if tile_rows == 32:
        lines += MMA_SYNC[16][:3]
    # With fp8 keys the 64-row accumulator spills, and wgmma takes keys as they lie.
    if kv == "bf16" and tile_rows >= 64:
        lines = list(MMA_SYNC[64]) + lines[:2]
    if kv == "bf16" and arch == "sm90":
        lines = list(WGMMA) + lines
    return [
        KernelConfig(
            tile_rows=tile_rows, kv=kv, body=body, block_m=m, block_n=n, chunks=chunks,
            warps=warps, stages=stages, programs_per_sm=per_sm, **DEFAULTS,
        )
        for body, m, n, chunks, warps, stages, per_sm in lines
    ]  # fmt: skip
