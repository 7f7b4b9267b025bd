"""MLA verify kernels in the Triton interpreter; run by test_mla_verify.py in its own process.

The interpreter is chosen when Triton is imported, so it cannot share a process with compiled
kernels. Writes one JSON object: case name -> greatest error, or a message.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from typing import Any

import msgspec
import numpy as np
import torch
import triton.language as tl

from fastverify.attention.ops import Workspace, mla_verify
from fastverify.attention.plan import KernelConfig, MlaVerifyPlan, fit
from tests.mla_reference import Case, make_case, reference

LATENT, ROPE, HEADS = 32, 16, 2
SCALE = 1.0 / math.sqrt(LATENT + ROPE)

CONFIGS = {
    "wide": KernelConfig(
        tile_rows=16, kv="bf16", body="wide", block_m=16, block_n=16, chunks=1, warps=4, stages=2,
        programs_per_sm=1, min_split_tokens=16, merge_columns=32, merge_splits=16, merge_warps=4,
    ),
    "chunked": KernelConfig(
        tile_rows=16, kv="bf16", body="chunked", block_m=16, block_n=16, chunks=2, warps=2,
        stages=2, programs_per_sm=1, min_split_tokens=16, merge_columns=32, merge_splits=2,
        merge_warps=4,
    ),
}  # fmt: skip

# name -> (totals, rows of each request, make_case options, mla_verify options)
CASES: dict[str, tuple[list[int], list[int], dict[str, Any], dict[str, Any]]] = {
    "one request": ([70], [3], {}, {}),
    "one key": ([1], [1], {}, {}),
    "rows only": ([4], [4], {}, {}),
    "one row": ([33], [1], {}, {}),
    "two row tiles": ([45], [12], {}, {}),
    "no keys": ([0], [2], {}, {}),
    "fewer keys than rows": ([2], [4], {}, {}),
    "mixed contexts": ([1, 130, 0, 17], [1] * 4, {}, {}),
    "mixed contexts, four rows": ([4, 100], [4] * 2, {}, {}),
    "rows of each request": ([40, 20, 9], [3, 1, 2], {}, {}),
    "a request without rows": ([40, 20, 9], [3, 0, 2], {}, {}),
    "one page": ([16], [2], {"page_size": 16}, {}),
    "page boundary": ([17, 16, 15], [2] * 3, {"page_size": 16}, {}),
    "tree": ([50, 8], [6, 6], {"tree": True}, {}),
    "tree, flattened mask": ([50, 8], [6, 6], {"tree": True}, {"full_mask": True}),
    "lengths with the rows": ([50, 9], [4, 4], {}, {"prefix": False}),
    "huge scores": ([90], [4], {"scale": 1e4}, {}),
    "tiny scores": ([90], [4], {"scale": 1e-6}, {}),
    "one dominating key": ([90], [4], {}, {"dominate": 41}),
    "dominating key of the future": ([90], [4], {}, {"dominate": 89}),
    "minus infinity": ([40], [2], {}, {"minus_infinity": True}),
    "fp8": ([50], [3], {"kv_dtype": torch.float8_e4m3fn}, {"k_scale": 0.5, "v_scale": 3.0}),
    "fp8, scales on the device": (
        [50, 3], [3, 3], {"kv_dtype": torch.float8_e4m3fn},
        {"k_scale": 0.5, "v_scale": 3.0, "device_scales": True},
    ),
    "no table rows": ([30, 12], [2, 2], {}, {"identity": True}),
    "separate rope": ([30, 12], [2, 2], {}, {"split_q": True}),
}  # fmt: skip

# The two bodies share schedule, masks and merge; these cover what differs.
WIDE_CASES = (
    "one request", "two row tiles", "mixed contexts", "page boundary", "tree",
    "fewer keys than rows", "fp8", "minus infinity",
)  # fmt: skip


def disturb(case: Case, options: dict[str, Any]) -> None:
    """Apply the adversarial changes that a case asks for."""
    if (key := options.get("dominate")) is not None:
        slot = case.table[case.table_rows[0], key].long()
        case.kv[slot, 0] = 20.0 * case.q[-1, 0]
    if options.get("minus_infinity"):
        # One key of -inf in a column where q is positive: its score is -inf, its weight zero.
        case.q[:, :, -1] = 1.0
        case.kv[case.table[case.table_rows[0], 5].long(), 0, -1] = -math.inf
    if options.get("identity"):
        case.table = case.table[case.table_rows]
        case.table_rows = torch.arange(len(case.totals))


def run(plan: MlaVerifyPlan, case: Case, options: dict[str, Any]) -> torch.Tensor:
    """Call mla_verify on a case; the output starts as NaN so that unwritten rows show."""
    uniform = all(r == plan.rows for r in case.rows)
    prefix = options.get("prefix", True)
    scales = {n: options.get(n, 1.0) for n in ("k_scale", "v_scale")}
    if options.get("device_scales"):
        scales = {n: torch.tensor([v]) for n, v in scales.items()}
    mask, mask_indptr = case.mask, None
    if options.get("full_mask"):
        mask, mask_indptr = case.full_mask()
    q, q_rope = case.q, None
    if options.get("split_q"):
        q, q_rope = case.q[..., :LATENT].contiguous(), case.q[..., LATENT:].contiguous()
    out = torch.full((*case.q.shape[:2], LATENT), math.nan, dtype=torch.bfloat16)
    workspace = Workspace.allocate(plan, "cpu")
    workspace.partial.fill_(math.nan)
    workspace.lse.fill_(math.nan)
    return mla_verify(
        plan, workspace, q, case.kv, case.table, case.seq_lens(prefix=prefix), out=out,
        sm_scale=SCALE, q_rope=q_rope, mask=mask, mask_indptr=mask_indptr, lens_are_prefix=prefix,
        table_rows=None if options.get("identity") else case.table_rows,
        qo_indptr=None if uniform else case.qo_indptr, **scales,
    )  # fmt: skip


def error_of(name: str, config: KernelConfig, sms: int) -> float:
    """Greatest error of a case, relative to 1 or to the value, whichever is larger."""
    totals, rows, make, options = CASES[name]
    case = make_case(
        totals, rows=rows, heads=HEADS, latent=LATENT, rope=ROPE, max_context=160, **make
    )
    disturb(case, options)
    kv = "fp8" if case.kv.dtype == torch.float8_e4m3fn else "bf16"
    plan = fit(
        msgspec.structs.replace(config, kv=kv), arch="cpu", sms=sms, heads=HEADS, rows=max(rows),
        batch=len(totals), max_context=160, page_size=case.page_size, latent=LATENT, rope=ROPE,
    )  # fmt: skip
    scales = {n: options[n] for n in ("k_scale", "v_scale") if n in options}
    want = reference(case, sm_scale=SCALE, latent=LATENT, **scales)
    got = run(plan, case, options).float()
    if not torch.isfinite(got).all():
        return math.inf
    return float(((got - want).abs() / want.abs().clamp(min=1.0)).max())


def widen_dot() -> None:
    """Give the interpreter a bf16 dot: Triton 3.8 multiplies the raw 16-bit patterns."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widen(a), widen(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def main() -> None:
    widen_dot()
    found: dict[str, float | str] = {}
    for body, config in CONFIGS.items():
        for name in CASES if body == "chunked" else WIDE_CASES:
            try:
                found[f"{body}: {name}"] = error_of(name, config, sms=7)
            except Exception:  # one failing case must not hide the others
                found[f"{body}: {name}"] = traceback.format_exc(limit=-3)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
