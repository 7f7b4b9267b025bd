"""What a rank does in the interpreter tests; runs in a process of its own (see tests/spawn.py)."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from typing import Any

import torch
from triton.runtime import interpreter

from fastverify.comm import launch as ar
from fastverify.comm.layout import Layout
from fastverify.comm.workspace import PeerError, Workspace
from tests import ar_reference as reference
from tests.spawn import Rank


def quicken_interpreter() -> None:
    """Four times the speed: Triton patches its language anew at every call of a device function,
    where once per module is enough, and checks every integer operation for overflow."""
    patched = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


quicken_interpreter()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def workspace(place: Rank, layout: Layout, rank: int) -> Workspace:
    """The workspace of a rank in the shared memory; the first to come must clear it."""
    bases = tuple(place.shared + 4096 + i * layout.size_bytes for i in range(layout.world))
    raw = (ctypes.c_uint8 * layout.size_bytes).from_address(bases[rank])
    return Workspace(layout, rank, bases, torch.frombuffer(raw, dtype=torch.uint8))


def rounds(place: Rank, layout: Layout, plan: list[dict]) -> list[dict]:
    """Run calls and compare each with the reference. A call is a dict of

    launch, rows, dtype, fused, whole, and for tests of the protocol: late (seconds this rank
    sleeps), stall (polls), fault, limit; the values of late and stall are by rank.
    Returns per call: outputs, and whether they are right.
    """
    ws = workspace(place, layout, place.rank)
    ws.clear()
    place.barrier.wait()
    return [one_call(ws, layout, place.rank, seed, **call) for seed, call in enumerate(plan)]


def one_call(
    ws: Workspace,
    layout: Layout,
    rank: int,
    seed: int,
    *,
    launch: ar.Launch,
    rows: int,
    dtype: str = "bf16",
    fused: bool = True,
    whole: bool = False,
    late: dict[int, float] | None = None,
    stall: dict[int, int] | None = None,
    fault: int = 0,
    limit: int = 4000,
    first: int | None = None,
    blocks: int | None = None,
) -> dict:
    make = reference.whole_inputs if whole else reference.real_inputs
    inputs = make(layout.world, rows, layout.hidden, DTYPES[dtype], seed)
    x = inputs[rank].clone()
    residual, weight = residual_and_weight(rows, layout.hidden, DTYPES[dtype], seed)
    time.sleep((late or {}).get(rank, 0.0))
    out, residual_out = torch.full_like(x, 7), torch.full_like(x, 7)
    tensors = ar.Tensors(x, out)
    if fused:
        tensors = ar.Tensors(x, out, residual, weight, residual_out)
    ar.run(
        launch, ws, tensors, eps=reference.EPS, max_blocks=1, limit=limit,
        fault=fault, stall=(stall or {}).get(rank, 0), first=first, blocks=blocks,
    )  # fmt: skip
    result = {
        "out": out,
        "residual": residual_out if fused else None,
        "wrong": judge(launch, inputs, tensors, x),
        "error": None,
    }
    try:
        ws.check()
    except PeerError as error:
        result["error"] = str(error)
    return result


def residual_and_weight(
    rows: int, hidden: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    residual = torch.randn(rows, hidden, generator=generator).to(dtype)
    if rows > 2:
        residual[2] = -0.0
    weight = torch.empty(hidden).uniform_(0.5, 1.5, generator=generator).to(dtype)
    return residual, weight


def judge(launch: ar.Launch, inputs: list[torch.Tensor], got: ar.Tensors, x: torch.Tensor) -> str:
    """What is wrong with the outputs of a call, or an empty string."""
    island = launch.algorithm is ar.Algorithm.ISLAND
    total = reference.total_by_island(inputs) if island else reference.total(inputs)
    if got.residual is None:
        return _differs("sum", got.out, total)
    residual = reference.new_residual(total, got.residual)
    wrong = _differs("residual", got.residual_out, residual)
    normed = reference.norm(residual, got.weight)
    good = torch.isclose(got.out.double(), normed, rtol=8e-3, atol=8e-3, equal_nan=True)
    return wrong if good.all() else wrong + f" norm: {int((~good).sum())} values are off"


def _differs(name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    if reference.same_bits(got, wanted):
        return ""
    return f"{name}: {reference.first_difference(got, wanted)}"


def block_rounds(place: Rank, layout: Layout, plan: list[dict]) -> str:
    """Like `rounds` for two ranks of two blocks; process 2 * rank + block. Returns what is wrong.

    The two blocks of a rank share its memory but not its outputs: each sees its own columns only,
    so a value is taken from whichever block wrote it.
    """
    rank, block = divmod(place.rank, 2)
    ws = workspace(place, layout, rank)
    if block == 0:
        ws.clear()
    place.barrier.wait()
    wrong = ""
    for seed, call in enumerate(plan):
        launch, rows, fused = call["launch"], call["rows"], call.get("fused", True)
        inputs = reference.real_inputs(layout.world, rows, layout.hidden, torch.bfloat16, seed)
        residual, weight = residual_and_weight(rows, layout.hidden, torch.bfloat16, seed)
        total = reference.total(inputs)
        wanted = reference.new_residual(total, residual) if fused else total
        got = torch.full_like(inputs[0], 7)
        out = torch.full_like(got, 7) if fused else got
        tensors = ar.Tensors(inputs[rank], out)
        if fused:
            tensors = ar.Tensors(inputs[rank], out, residual, weight, got)
        ar.run(
            launch, ws, tensors, eps=reference.EPS, max_blocks=2, limit=4000, first=block, blocks=2
        )
        # The next launch of a rank starts after all its blocks, as on a stream.
        place.barrier.wait()
        written = got != 7
        if not reference.same_bits(got[written], wanted[written]) or not written.any():
            wrong += f"call {seed}: {reference.first_difference(got, wanted)} "
        if fused:
            normed = reference.norm(wanted, weight)[written]
            if not torch.allclose(out[written].double(), normed, rtol=8e-3, atol=8e-3):
                wrong += f"call {seed}: norm "
        if ws.calls() != seed + 1:
            wrong += f"call {seed}: counted {ws.calls()} "
    return wrong


def absent(place: Rank, layout: Layout, plan: list[dict], who: int) -> str:
    """`rounds` on all ranks but one; twice, since calls after an error must not wait again.

    Returns the error of this rank.
    """
    ws = workspace(place, layout, place.rank)
    ws.clear()
    place.barrier.wait()
    if place.rank == who:
        return ""
    error = one_call(ws, layout, place.rank, 0, **plan[0])["error"]
    start = time.monotonic()
    one_call(ws, layout, place.rank, 1, **{**plan[0], "limit": 1_000_000_000})
    if time.monotonic() - start > 30:
        return ""
    return error or ""
