"""What a rank does in tests/test_collective_interface.py: CPU processes over gloo."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist

from fastverify.comm.agreement import agree, require_same
from fastverify.comm.reference import Reference
from fastverify.comm.workspace import PeerError
from tests import ar_reference
from tests.spawn import Rank


def _group(place: Rank, folder: str) -> Any:
    store = dist.FileStore(str(pathlib.Path(folder) / "store"), place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    return dist.group.WORLD


def reference(place: Rank, folder: str) -> str:
    """Compare the reference backend with sums made here."""
    backend = Reference(_group(place, folder))
    inputs = ar_reference.real_inputs(place.world, 5, 256, torch.bfloat16, 3)
    mine = inputs[place.rank]
    sent = mine.clone()
    residual, weight = torch.randn(5, 256).bfloat16(), torch.rand(256).bfloat16()
    dist.broadcast(residual, 0)
    dist.broadcast(weight, 0)
    total = backend.all_reduce(mine)
    fused = backend.all_reduce_residual_rmsnorm(mine, residual, weight, ar_reference.EPS)
    assert total is not None and fused is not None
    wanted = ar_reference.new_residual(ar_reference.total(inputs), residual)
    normed = ar_reference.norm(wanted, weight)
    near = torch.isclose(fused[0].double(), normed, rtol=8e-3, atol=8e-3, equal_nan=True)
    checks = {
        "sum": ar_reference.same_bits(total, ar_reference.total(inputs)),
        "residual": ar_reference.same_bits(fused[1], wanted),
        "norm": bool(near.all()),
        "input kept": ar_reference.same_bits(mine, sent),
        "empty declined": backend.all_reduce(mine[:0]) is None,
    }
    return ", ".join(name for name, good in checks.items() if not good)


def different_plans(place: Rank, folder: str) -> str:
    try:
        require_same(_group(place, folder), f"{3 + place.rank} rows", "plans")
    except PeerError as error:
        return str(error)
    return "no error"


def one_fails(place: Rank, folder: str) -> str:
    def work() -> int:
        if place.rank == 1:
            raise RuntimeError("no memory left")
        return 1

    try:
        agree(_group(place, folder), work, "map memory")
    except PeerError as error:
        return str(error)
    return "no error"


def die(place: Rank) -> None:
    if place.rank == 1:
        os._exit(3)
