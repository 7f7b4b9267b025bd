"""MLA verify attention: check on the host, launch two kernels, allocate nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import torch

from fastverify.attention.plan import KernelConfig, MlaVerifyPlan
from fastverify.errors import ConfigError

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
Scale: TypeAlias = "float | torch.Tensor"


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Partial results of the splits: bf16 [programs, rows * heads, latent], fp32 log-sum-exp.

    Holds nothing between calls. Calls on one stream may share it; two streams may not.
    """

    partial: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def allocate(plan: MlaVerifyPlan, device: torch.device | str) -> Workspace:
        """A workspace of plan.workspace_bytes; call before capture."""
        return Workspace.view(
            plan, torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
        )

    @staticmethod
    def view(plan: MlaVerifyPlan, memory: torch.Tensor) -> Workspace:
        """A workspace inside uint8 memory that other plans may use in turn."""
        if memory.dtype != torch.uint8 or memory.numel() < plan.workspace_bytes:
            raise ConfigError(
                f"MLA verify workspace is {memory.numel()} x {memory.dtype}, its plan needs "
                f"{plan.workspace_bytes} bytes of uint8; allocate the largest plan's size."
            )
        lines = plan.rows * plan.heads
        size = 2 * plan.programs * lines * plan.latent
        return Workspace(
            memory[:size].view(torch.bfloat16).view(plan.programs, lines, plan.latent),
            memory[size : plan.workspace_bytes].view(torch.float32).view(plan.programs, lines),
        )


def mla_verify(
    plan: MlaVerifyPlan,
    workspace: Workspace,
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    sm_scale: float,
    q_rope: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    lens_are_prefix: bool = True,
) -> torch.Tensor:
    """Absorbed MLA attention of each request's newest rows, whose keys are already in the pool.

    q: [tokens, heads, latent + rope], or [tokens, heads, latent] with q_rope [tokens, heads, rope].
    kv: [slots, 1, latent + rope]; values are the first `latent` columns.
    table: int32 page table [.., pages]: its row of request b is table_rows[b] (SGLang's
      req_to_token with req_pool_indices), or b.
    seq_lens: int [batch], keys before the new rows (lens_are_prefix) or with them.
    qo_indptr: int [batch + 1], first query token of each request; absent, `rows` tokens each.
    mask: row i of a request sees its prefix and, without a mask, new tokens 0..i. A tree passes
      uint8 or bool [batch, rows, rows], or SGLang's flattened FULL_MASK with mask_indptr.
    k_scale, v_scale: factors of fp8 keys and values, on the host or one-element device tensors.
    out: [tokens, heads, latent], contiguous. Rows without a visible key become zero; tokens past
      the last request's rows are not written.

    Capture safe: no allocation and no synchronisation. Raises ConfigError before any launch.
    Operation: softmax(sm_scale * k_scale * q @ k.T + mask) @ k[:, :latent] * v_scale.
    """
    if q_rope is None:
        q, q_rope = q[..., : plan.latent], q[..., plan.latent :]
    kv = kv.squeeze(1) if kv.dim() == 3 else kv
    _check_query(plan, q, q_rope, out, qo_indptr)
    _check_keys(plan, kv, table, table_rows, seq_lens)
    _check_mask(plan, mask, mask_indptr)
    _check_workspace(plan, workspace)
    k_factor, k_tensor = _split_scale("k_scale", k_scale)
    v_factor, v_tensor = _split_scale("v_scale", v_scale)
    _launch(
        plan, workspace, q, q_rope, kv, table, table_rows, seq_lens, qo_indptr, mask, mask_indptr,
        k_tensor, v_tensor, out, sm_scale * k_factor, v_factor, lens_are_prefix,
    )  # fmt: skip
    return out


def _launch(
    plan: MlaVerifyPlan, workspace: Workspace, q: torch.Tensor, q_rope: torch.Tensor,
    kv: torch.Tensor, table: torch.Tensor, table_rows: torch.Tensor | None,
    seq_lens: torch.Tensor, qo_indptr: torch.Tensor | None, mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None, k_tensor: torch.Tensor | None,
    v_tensor: torch.Tensor | None, out: torch.Tensor, sm_scale: float, v_scale: float,
    lens_are_prefix: bool,
) -> None:  # fmt: skip
    # Imported here: planning must work where Triton is absent or not yet configured.
    from fastverify.kernels.triton.mla_merge import mla_merge_kernel

    body = body_kernel(plan.config)
    options = {"launch_pdl": True} if plan.pdl else {}
    mask = mask.view(torch.uint8) if mask is not None else None
    body[(plan.row_tiles, plan.programs)](
        q, q_rope, kv, table, table_rows, seq_lens, qo_indptr, mask, mask_indptr,
        k_tensor, v_tensor, out, workspace.partial, workspace.lse, sm_scale, v_scale,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), table.stride(0),
        *_sizes(plan), **body_constants(plan, kv.stride(0), lens_are_prefix),
        num_warps=plan.config.warps, num_stages=plan.config.stages, **options,
    )  # fmt: skip
    lines, columns, _ = plan.merge
    mla_merge_kernel[(plan.latent // columns, -(-plan.rows * plan.heads // lines), plan.batch)](
        workspace.partial, workspace.lse, seq_lens, qo_indptr, v_tensor, out, v_scale,
        *_sizes(plan), **merge_constants(plan, lens_are_prefix),
        num_warps=plan.config.merge_warps, **options,
    )  # fmt: skip


def body_kernel(config: KernelConfig) -> Any:
    """The kernel of a configuration's body; each module is imported only when it is used."""
    if config.body == "wgmma":
        from fastverify.kernels.triton.mla_wgmma import mla_wgmma_kernel

        return mla_wgmma_kernel
    from fastverify.kernels.triton.mla_verify import mla_chunked_kernel, mla_wide_kernel

    return mla_wide_kernel if config.body == "wide" else mla_chunked_kernel


def _sizes(plan: MlaVerifyPlan) -> tuple[int, int, int, int]:
    return plan.batch, plan.max_context, plan.programs, plan.config.min_split_tokens


def _schedule_constants(plan: MlaVerifyPlan, lens_are_prefix: bool) -> dict[str, int | bool]:
    return {
        "BATCH_POW2": 1 << (plan.batch - 1).bit_length(),
        "ROWS": plan.rows,
        "HEADS": plan.heads,
        "LATENT": plan.latent,
        "LENS_ARE_PREFIX": lens_are_prefix,
        "BLOCK_N": plan.config.block_n,
        "PDL": plan.pdl,
    }


def body_constants(
    plan: MlaVerifyPlan, kv_stride: int, lens_are_prefix: bool
) -> dict[str, int | bool]:
    """Compile-time constants of the split kernel, by name."""
    constants = _schedule_constants(plan, lens_are_prefix) | {
        "ROPE": plan.rope,
        "KV_STRIDE": kv_stride,
        "PAGE_SIZE": plan.page_size,
        "BLOCK_M": plan.config.block_m,
        "CHUNKS": plan.config.chunks,
    }
    # Triton takes the stages as a compiler option, Gluon code as a constant.
    return constants | ({"STAGES": plan.config.stages} if plan.config.body == "wgmma" else {})


def merge_constants(plan: MlaVerifyPlan, lens_are_prefix: bool) -> dict[str, int | bool]:
    """Compile-time constants of the merge kernel, by name."""
    lines, columns, splits = plan.merge
    return _schedule_constants(plan, lens_are_prefix) | {
        "LINES": lines,
        "COLUMNS": columns,
        "SPLITS": splits,
    }


def _require(ok: bool, what: str, got: object, need: str) -> None:
    if not ok:
        raise ConfigError(f"MLA verify got {what} {got}, needs {need}.")


def _check_query(
    plan: MlaVerifyPlan,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    out: torch.Tensor,
    qo_indptr: torch.Tensor | None,
) -> None:
    tokens, most = q.shape[0], plan.batch * plan.rows
    heads = (tokens, plan.heads)
    _require(q.dtype == torch.bfloat16 == q_rope.dtype, "q dtype", q.dtype, "bfloat16")
    _require(out.dtype == torch.bfloat16, "out dtype", out.dtype, "bfloat16")
    _require(tokens <= most, "query tokens", tokens, f"at most batch x rows = {most}")
    _require(
        qo_indptr is not None or tokens == most,
        "query tokens", tokens, f"batch x rows = {most}, or qo_indptr",
    )  # fmt: skip
    _require(q.shape == (*heads, plan.latent), "q", tuple(q.shape), f"{(*heads, plan.latent)}")
    _require(
        q_rope.shape == (*heads, plan.rope), "q_rope", tuple(q_rope.shape), f"{(*heads, plan.rope)}"
    )
    _require(out.shape == q.shape, "out", tuple(out.shape), f"{tuple(q.shape)}")
    _require(out.is_contiguous(), "out strides", out.stride(), "a contiguous tensor")
    _require(
        q.stride(2) == 1 == q_rope.stride(2), "q strides", q.stride(), "a contiguous last axis"
    )
    if qo_indptr is not None:
        _require(
            qo_indptr.shape == (plan.batch + 1,),
            "qo_indptr", tuple(qo_indptr.shape), f"({plan.batch + 1},)",
        )  # fmt: skip


def _check_keys(
    plan: MlaVerifyPlan,
    kv: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor | None,
    seq_lens: torch.Tensor,
) -> None:
    width = plan.latent + plan.rope
    _require(kv.dtype == KV_DTYPES[plan.kv], "kv dtype", kv.dtype, f"{KV_DTYPES[plan.kv]}")
    _require(kv.dim() == 2 and kv.shape[1] == width, "kv", tuple(kv.shape), f"[slots, 1, {width}]")
    aligned = kv.data_ptr() % 16 == 0 and kv.stride(0) * kv.element_size() % 16 == 0
    _require(
        aligned and kv.stride(1) == 1, "kv strides", kv.stride(), "16-byte aligned, dense rows"
    )
    _require(table.dtype == torch.int32, "page table dtype", table.dtype, "int32")
    _require(
        table.dim() == 2 and table.stride(1) == 1, "page table", tuple(table.shape), "[.., pages]"
    )
    reach = table.shape[1] * plan.page_size
    _require(
        reach >= plan.max_context, "a page table of", f"{reach} keys", f">= {plan.max_context}"
    )
    by_row = table.shape[0] if table_rows is None else table_rows.shape[0]
    _require(by_row >= plan.batch, "page table rows for", by_row, f"{plan.batch} requests")
    _require(seq_lens.shape == (plan.batch,), "seq_lens", tuple(seq_lens.shape), f"({plan.batch},)")
    for name, lens in (("seq_lens", seq_lens), ("table_rows", table_rows)):
        _require(
            lens is None or lens.dtype in (torch.int32, torch.int64),
            f"{name} dtype", lens.dtype if lens is not None else None, "int32 or int64",
        )  # fmt: skip


def _check_mask(
    plan: MlaVerifyPlan, mask: torch.Tensor | None, mask_indptr: torch.Tensor | None
) -> None:
    if mask is None:
        _require(mask_indptr is None, "mask_indptr", "alone", "a mask with it")
        return
    _require(mask.dtype in (torch.bool, torch.uint8), "mask dtype", mask.dtype, "bool or uint8")
    _require(mask.is_contiguous(), "mask strides", mask.stride(), "a contiguous tensor")
    size = plan.batch * plan.rows * plan.rows
    _require(
        mask_indptr is not None or mask.numel() == size,
        "mask entries", mask.numel(), f"batch x rows x rows = {size}",
    )  # fmt: skip
    _require(
        mask_indptr is None or mask_indptr.shape[0] >= plan.batch,
        "mask_indptr entries", mask_indptr.shape[0] if mask_indptr is not None else None,
        f">= {plan.batch}",
    )  # fmt: skip


def _check_workspace(plan: MlaVerifyPlan, workspace: Workspace) -> None:
    need = (plan.programs, plan.rows * plan.heads, plan.latent)
    got = tuple(workspace.partial.shape)
    _require(got == need, "workspace", got, f"{need} of its plan")


def _split_scale(name: str, scale: Scale) -> tuple[float, torch.Tensor | None]:
    if not isinstance(scale, torch.Tensor):
        return float(scale), None
    _require(scale.numel() == 1, f"{name} entries", scale.numel(), "1")
    return 1.0, scale
