"""Which MLA verify kernel a shape gets, and the memory it needs: pure functions of plain values."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Literal

import msgspec

from fastverify.errors import ConfigError

KvDtype = Literal["bf16", "fp8"]
LATENT, ROPE = 512, 64
# One bit a new token in a 32-bit word, of which the kernel unrolls the loads.
MAX_ROWS = 16
_INT32_MAX = 2**31 - 1


class KernelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the table: how to run up to `tile_rows` rows x heads of a request.

    body: `wide` or `chunked` (kernels/triton/mla_verify.py), `wgmma` (mla_wgmma.py: SM90, bf16,
    block_m 64, 8 warps). chunks: parts of the latent (chunked) or of a key tile (wgmma).
    programs_per_sm: resident programs the split count aims at.
    min_split_tokens: a split shorter than this costs more to merge than it saves.
    merge_columns, merge_splits: output columns of a merge program, splits it reads at once, for
    one request; see `merge_shape`.
    """

    tile_rows: int
    kv: KvDtype
    body: Literal["wide", "chunked", "wgmma"]
    block_m: int
    block_n: int
    chunks: int
    warps: int
    stages: int
    programs_per_sm: int
    min_split_tokens: int
    merge_columns: int
    merge_splits: int
    merge_warps: int


class ArchTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configurations of one GPU architecture, and where they come from.

    measured: false when chosen by the limits of the chip alone. pdl: launch dependents early.
    """

    measured: bool
    gpu: str
    date: str
    commit: str
    shared_limit_bytes: int
    pdl: bool
    config: tuple[KernelConfig, ...] = ()


class MlaVerifyPlan(msgspec.Struct, frozen=True):
    """Everything fixed at capture. Lengths, page table and row counts stay on the device.

    programs: split programs of each row tile; every request mix fits (see `split_tokens`).
    merge: lines (row x head), columns and splits of a merge program.
    workspace_bytes: bf16 partial outputs, fp32 log-sum-exp; layers share one workspace.
    """

    arch: str
    heads: int
    rows: int
    batch: int
    max_context: int
    kv: KvDtype
    page_size: int
    latent: int
    rope: int
    config: KernelConfig
    pdl: bool
    row_tiles: int
    programs: int
    merge: tuple[int, int, int]
    workspace_bytes: int


@functools.cache
def load_table() -> dict[str, ArchTable]:
    """The shipped table, by architecture (`sm90`, `sm120`)."""
    text = importlib.resources.files("fastverify.kernels") / "tables" / "mla_verify.toml"
    return msgspec.toml.decode(text.read_bytes(), type=dict[str, ArchTable])


def arch_name(capability: tuple[int, int]) -> str:
    """Table section of a CUDA compute capability: (9, 0) -> `sm90`; SM121 shares `sm120`."""
    major, minor = capability
    return "sm120" if major == 12 else f"sm{major}{minor}"


def plan(
    *,
    arch: str,
    sms: int,
    heads: int,
    rows: int,
    batch: int,
    max_context: int,
    kv: KvDtype = "bf16",
    page_size: int = 1,
    table: dict[str, ArchTable] | None = None,
) -> MlaVerifyPlan | None:
    """Plan for at most `rows` query rows in each of `batch` requests; None declines.

    heads: query heads on this rank. max_context: most keys of a request, new rows included.
    Declines an architecture without a table section, more than MAX_ROWS rows, and batches whose
    keys a 32-bit count cannot hold. Raises ConfigError for values that describe no batch.
    """
    sizes = {"sms": sms, "heads": heads, "rows": rows, "batch": batch, "page_size": page_size}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"MLA verify needs {name} >= 1, got {value}; pass a positive count.")
    if max_context < rows:
        raise ConfigError(
            f"MLA verify got max_context {max_context}, less than its {rows} rows; "
            "raise the context length or lower the draft tokens."
        )
    section = (load_table() if table is None else table).get(arch)
    if section is None or rows > MAX_ROWS:
        return None
    # `split_tokens` adds all lengths, and multiplies half of one by up to 47.
    if batch * max_context > _INT32_MAX // 2 or max_context > _INT32_MAX // 64:
        return None
    config = choose(section, heads * rows, kv)
    return (
        None
        if config is None
        else fit(
            config,
            arch=arch,
            sms=sms,
            heads=heads,
            rows=rows,
            batch=batch,
            max_context=max_context,
            page_size=page_size,
            pdl=section.pdl,
        )
    )


def choose(section: ArchTable, tile_rows: int, kv: KvDtype) -> KernelConfig | None:
    """Smallest configuration that holds tile_rows, else the largest (several tiles)."""
    known = sorted((c for c in section.config if c.kv == kv), key=lambda c: c.tile_rows)
    return next((c for c in known if c.tile_rows >= tile_rows), known[-1] if known else None)


def fit(
    config: KernelConfig,
    *,
    arch: str,
    sms: int,
    heads: int,
    rows: int,
    batch: int,
    max_context: int,
    page_size: int = 1,
    pdl: bool = False,
    latent: int = LATENT,
    rope: int = ROPE,
) -> MlaVerifyPlan:
    """Plan with a given configuration: grid and memory.

    The grid fills the GPU once over all row tiles. `split_tokens` needs programs >= 2 * batch
    once there are several requests, so large batches get whole further waves.
    """
    row_tiles = -(-heads * rows // config.block_m)
    wave = max(1, sms * config.programs_per_sm // row_tiles)
    needed = 1 if batch == 1 else 2 * batch
    programs = wave * -(-needed // wave)
    # A request never has more splits than key tiles.
    programs = min(programs, max(needed, batch * -(-max_context // config.min_split_tokens)))
    return MlaVerifyPlan(
        arch=arch,
        heads=heads,
        rows=rows,
        batch=batch,
        max_context=max_context,
        kv=config.kv,
        page_size=page_size,
        latent=latent,
        rope=rope,
        config=config,
        pdl=pdl,
        row_tiles=row_tiles,
        programs=programs,
        merge=merge_shape(config, batch=batch, programs=programs, latent=latent),
        workspace_bytes=programs * rows * heads * (2 * latent + 4),
    )


def merge_shape(
    config: KernelConfig, *, batch: int, programs: int, latent: int
) -> tuple[int, int, int]:
    """Lines, columns and splits of a merge program, the same number of values at any batch.

    Requests of a batch share the programs, so each has few splits; a merge program then takes
    more columns, and beyond those more lines, instead of reading splits that are not there.
    Any shape is correct for any number of splits.
    """
    values = config.merge_columns * config.merge_splits
    usual = 1 << (-(-2 * programs // batch) - 1).bit_length()
    splits = max(1, min(config.merge_splits, usual))
    columns = min(latent, values // splits)
    return max(1, min(16, values // (splits * columns))), columns, splits


def split_lengths(plan: MlaVerifyPlan, totals: list[int]) -> tuple[int, list[int]]:
    """Split length and splits of each request, as the kernel computes them from the lengths."""
    totals = [max(0, min(total, plan.max_context)) for total in totals]
    base = -(-sum(totals) // plan.programs)
    block, least = plan.config.block_n, plan.config.min_split_tokens
    for step in range(1 if len(totals) == 1 else 32):
        tokens = -(-max(-(-base * (16 + step) // 16), least) // block) * block
        splits = [-(-total // tokens) for total in totals]
        if sum(splits) <= plan.programs:
            return tokens, splits
    raise ConfigError(
        f"MLA verify cannot split {len(totals)} requests over {plan.programs} programs; "
        f"the plan is for {plan.batch} requests."
    )


def check_lengths(plan: MlaVerifyPlan, totals: list[int]) -> None:
    """Refuse, from host copies, total key counts (new rows included) that the plan lacks."""
    if len(totals) > plan.batch:
        raise ConfigError(
            f"MLA verify got {len(totals)} requests but was planned for {plan.batch}; "
            "capture a larger batch."
        )
    for index, total in enumerate(totals):
        if not 0 <= total <= plan.max_context:
            raise ConfigError(
                f"MLA verify request {index} has {total} keys, outside 0..{plan.max_context} of "
                "its plan; raise the context length the graphs are captured for."
            )


def check_pages(plan: MlaVerifyPlan, pages: list[int], slots: int) -> None:
    """Refuse, from host copies, page ids that point outside a pool of `slots` slots."""
    limit = slots // plan.page_size
    for page in pages:
        if not 0 <= page < limit:
            raise ConfigError(
                f"MLA verify got page {page}, outside 0..{limit - 1} of a pool of {slots} slots "
                f"with page size {plan.page_size}; the page table is corrupt."
            )
