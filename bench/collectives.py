"""Fused all-reduce + residual + RMSNorm on one GPU, every rank a stream with a graph of its own.

    python -m bench.collectives [--world 2 4 8] [--rows 3 1 8 2 4 6] [--seconds 85]

Each contender runs 122 calls a graph, as many as one step of Kimi-K2.5. A sample is the time from
a common start to the end of the last rank, over 122. Outputs are verified before and after; a
wrong contender is an error, not a row. On one GPU peers share its L2, so these times are the
kernels' own cost without a bus: the bound of PCIe for the same shape stands beside them.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bench import pcie_model
from bench.harness import median_and_spread, write_result
from fastverify.comm import launch as ar
from fastverify.comm import local
from fastverify.comm.layout import Layout

HIDDEN = 7168
CALLS = 122
EPS = 1e-6
CONFIG_LIMIT_SECONDS = 40
LAUNCHES = {
    2: ("one_shot_1", "one_shot_4", "two_shot_4", "two_shot_2"),
    4: ("one_shot_1", "one_shot_4", "two_shot_4", "two_shot_2"),
    8: ("two_shot_4", "two_shot_2", "two_shot_7", "one_shot_1", "island_4"),
}
DECLINED = {
    "nccl": "NCCL refuses two ranks on one GPU",
    "pcie_ipc": "FlashInfer's workspace needs one process per rank",
    "trtllm": "FlashInfer's workspace needs one process per rank",
    "b12x": "its pool needs one process per rank",
}


class Problem(NamedTuple):
    """Inputs of all ranks, room for their outputs, and the right answer."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    residual_out: torch.Tensor
    wanted: torch.Tensor
    normed: torch.Tensor


Body = Callable[[int], None]


def problem(world: int, rows: int) -> Problem:
    """Small whole numbers, so that every order of summation gives the same bits."""
    generator = torch.Generator("cuda").manual_seed(17)
    shape = (world, rows, HIDDEN)
    x = torch.randint(-8, 8, shape, generator=generator, device="cuda").bfloat16()
    residual = torch.randn(shape[1:], generator=generator, device="cuda").bfloat16()
    weight = torch.rand(HIDDEN, generator=generator, device="cuda").bfloat16() + 0.5
    wanted = (x.float().sum(0).bfloat16().float() + residual.float()).bfloat16()
    scale = torch.rsqrt(wanted.double().square().mean(-1, keepdim=True) + EPS)
    normed = wanted.double() * scale * weight.double()
    return Problem(x, residual, weight, torch.empty_like(x), torch.empty_like(x), wanted, normed)


def reset(work: Problem) -> None:
    """Spoil the outputs; SGLang's add and norm reads the old residual where it writes the new."""
    work.out.fill_(torch.nan)
    work.residual_out.copy_(work.residual.expand_as(work.residual_out))


def verify(name: str, work: Problem) -> None:
    """Exit when an output is wrong or ranks differ."""
    same = all(torch.equal(out, work.out[0]) for out in work.out)
    exact = all(torch.equal(residual, work.wanted) for residual in work.residual_out)
    near = torch.allclose(work.out[0].double(), work.normed, rtol=8e-3, atol=8e-3)
    if not (same and exact and near):
        sys.exit(f"{name}: wrong result (ranks equal {same}, residual {exact}, norm {near})")


def bodies(ranks: local.LocalRanks, work: Problem, rows: int) -> Iterator[tuple[str, Body]]:
    """Contenders that take the shape, loaded, each as a function that launches a rank's call."""
    world = ranks.layout.world
    plain = None
    for name in LAUNCHES[world]:
        kind, parts = name.rsplit("_", 1)
        launch = ar.Launch(ar.Algorithm[kind.upper()], int(parts))
        if ar.why_not(launch, ranks.layout, rows, ranks.max_blocks(launch)) is not None:
            continue
        plain = plain or (launch if launch.algorithm is ar.Algorithm.TWO_SHOT else None)

        def fused(rank: int, launch: ar.Launch = launch) -> None:
            ranks.call(rank, launch, tensors(work, rank), eps=EPS)

        ranks.load(launch, tensors(work, 0))
        yield name, fused
    norm = add_norm()
    if plain is not None and norm is not None:
        ranks.load(plain, ar.Tensors(work.x[0], work.out[0]))
        yield "two_kernels", two_kernels(ranks, work, plain, norm)


def two_kernels(ranks: local.LocalRanks, work: Problem, launch: ar.Launch, norm: Any) -> Body:
    """Our all-reduce without the norm, then SGLang's fused add and norm: what fusing saves."""

    def body(rank: int) -> None:
        ranks.call(rank, launch, ar.Tensors(work.x[rank], work.out[rank]))
        norm(work.out[rank], work.residual_out[rank], work.weight, EPS)

    norm(work.out[0], work.residual_out[0], work.weight, EPS)
    return body


def add_norm() -> Any:
    """SGLang's fused add + RMSNorm kernel, or None where it is not installed."""
    try:
        from sgl_kernel import fused_add_rmsnorm
    except (ImportError, OSError):
        return None
    return fused_add_rmsnorm


def tensors(work: Problem, rank: int) -> ar.Tensors:
    """One rank's share of the problem."""
    return ar.Tensors(
        work.x[rank], work.out[rank], work.residual, work.weight, work.residual_out[rank]
    )


def measure(
    ranks: local.LocalRanks, name: str, work: Problem, body: Body, samples: int
) -> list[float]:
    """Samples of one call in us, verified before and after."""
    faulthandler.dump_traceback_later(CONFIG_LIMIT_SECONDS, exit=True)

    def once() -> None:
        reset(work)
        ranks.together(body)
        ranks.check()
        verify(name, work)

    def step(rank: int) -> None:
        for _ in range(CALLS):
            body(rank)

    once()
    graphs = ranks.capture(step)

    def replay() -> float:
        return ranks.together(lambda rank: graphs[rank].replay())

    for _ in range(5):
        replay()
    reset(work)
    taken = [replay() / CALLS for _ in range(samples)]
    ranks.check()
    if not name.endswith("two_kernels"):  # it has added the residual in place all the time
        verify(name, work)
    once()
    faulthandler.cancel_dump_traceback_later()
    return taken


def bound_us(world: int, rows: int) -> float:
    """Least time over PCIe Gen5 x16, no launch and no arithmetic: the best of the algorithms."""
    payload_bytes = rows * HIDDEN * 2.0
    if world == 8:
        return min(
            pcie_model.one_shot_us(payload_bytes),
            pcie_model.two_shot_us(payload_bytes),
            pcie_model.island_us(payload_bytes),
        )
    link, hop = pcie_model.LINK_BYTES_PER_US, pcie_model.SAME_SWITCH_US
    one_shot = (world - 1) * payload_bytes / link + hop
    two_shot = 2 * ((world - 1) / world * payload_bytes / link + hop)
    return min(one_shot, two_shot)


def run(worlds: Sequence[int], rows_list: Sequence[int], seconds: float, samples: int) -> None:
    deadline = time.monotonic() + seconds
    summary: dict[str, float] = {}
    raw: dict[str, Any] = {"declined": DECLINED, "left_out": []}
    worlds_ready = {w: local.LocalRanks(Layout(w, HIDDEN, max(rows_list))) for w in worlds}
    for rows in rows_list:
        for world in worlds:
            if time.monotonic() > deadline:
                raw["left_out"].append(f"world{world}.rows{rows}")
                continue
            shape = f"world{world}.rows{rows}"
            work = problem(world, rows)
            ranks = worlds_ready[world]
            best = float("inf")
            for name, body in bodies(ranks, work, rows):
                taken = measure(ranks, f"{shape}.{name}", work, body, samples)
                time_us, spread_us = median_and_spread(taken)
                print(f"{shape:<16} {name:<14} {time_us:7.2f} +- {spread_us:.2f} us", flush=True)
                summary[f"us.{shape}.{name}"] = round(time_us, 3)
                raw[f"{shape}.{name}"] = [round(sample, 3) for sample in taken]
                best = min(best, time_us if name != "two_kernels" else best)
            summary[f"us.{shape}.fastverify"] = round(best, 3)
            summary[f"pcie_bound_us.{shape}"] = round(bound_us(world, rows), 2)
    for name, reason in DECLINED.items():
        print(f"{name} declined: {reason}")
    print("left out for time:", ", ".join(raw["left_out"]) or "nothing")
    print(write_result("collectives", "one-gpu", summary=summary, samples=raw))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8], choices=LAUNCHES)
    parser.add_argument("--rows", type=int, nargs="+", default=[3, 1, 8, 2, 4, 6])
    parser.add_argument("--seconds", type=float, default=75.0, help="start nothing after this")
    parser.add_argument("--samples", type=int, default=60)
    options = parser.parse_args()
    run(options.world, options.rows, options.seconds, options.samples)


if __name__ == "__main__":
    local.allow_many_streams()
    main()
