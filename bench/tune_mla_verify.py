"""Measure MLA verify configurations on this GPU and write its section of the table.

    python -m bench.tune_mla_verify --seconds 150 --table kernels/tables/mla_verify.toml

Configurations are compiled by worker processes into Triton's cache, checked against an fp32
reference, then timed in a CUDA graph. First every body at its default split, then split and
merge settings for the two best. What the time limit cuts off keeps its previous entry.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import math
import multiprocessing
import pathlib
import statistics
import sys
import time
from typing import Any

import msgspec

from bench import harness
from fastverify.attention.plan import ArchTable, KernelConfig, KvDtype, arch_name, fit, load_table

HEADS = 8
TILE_ROWS = (32, 64, 16)
# Weights say what serving meets most; each ratio counts, so no context drowns another.
CONTEXTS = {512: 1.0, 4096: 1.5, 16384: 1.5, 32768: 1.0, 131072: 1.0}
MAX_CONTEXT = 131072 + 64
DEFAULTS = {
    "min_split_tokens": 64, "merge_columns": 128, "merge_splits": 64, "merge_warps": 4,
}  # fmt: skip
SPLIT_SETTINGS = (
    {"min_split_tokens": 32}, {"min_split_tokens": 128}, {"min_split_tokens": 256},
)  # fmt: skip
MERGE_SETTINGS = (
    {"merge_columns": 64}, {"merge_columns": 256}, {"merge_splits": 32}, {"merge_splits": 128},
    {"merge_warps": 8, "merge_splits": 128}, {"merge_warps": 8, "merge_columns": 256},
)  # fmt: skip


def candidates(arch: str, tile_rows: int | None = None, kv: KvDtype = "bf16") -> list[KernelConfig]:
    """Bodies worth measuring for a tile of rows x heads; None: for every tile."""
    if tile_rows is None:
        return [c for tile in sorted(TILE_ROWS) for c in candidates(arch, tile, kv)]
    # body, block_m, block_n, chunks, warps, stages, programs_per_sm
    lines = [
        ("chunked", 16, 32, 8, 8, 3, 1),
        ("chunked", 16, 32, 4, 4, 3, 2),
        ("chunked", 16, 16, 4, 4, 3, 2),
    ]
    if tile_rows == 16:
        lines += [("chunked", 16, 64, 8, 8, 3, 1), ("wide", 16, 32, 1, 4, 3, 2)]
    if tile_rows >= 32:
        lines += [
            ("chunked", 32, 32, 8, 8, 3, 1),
            ("chunked", 32, 16, 8, 8, 3, 1),
            ("wide", 32, 32, 1, 8, 3, 1),
        ]
    # With fp8 keys the 64-row accumulator spills.
    if tile_rows >= 32 and kv == "bf16":
        lines += [
            ("wide", 64, 32, 1, 8, 3, 1),
            ("wide", 64, 32, 1, 8, 4, 1),
            ("wide", 64, 64, 1, 8, 2, 1),
        ]
    return [
        KernelConfig(
            tile_rows=tile_rows, kv=kv, body=body, block_m=m, block_n=n, chunks=chunks,
            warps=warps, stages=stages, programs_per_sm=per_sm, **DEFAULTS,
        )
        for body, m, n, chunks, warps, stages, per_sm in lines
    ]  # fmt: skip


def plan_for(config: KernelConfig, arch: str, sms: int) -> Any:
    return fit(
        config, arch=arch, sms=sms, heads=HEADS, rows=config.tile_rows // HEADS, batch=1,
        max_context=MAX_CONTEXT, pdl=load_table()[arch].pdl,
    )  # fmt: skip


def warm(config: KernelConfig, arch: str, sms: int) -> str:
    """Compile a configuration by running it once; runs in a worker process."""
    import torch

    from bench.mla_inputs import Problem

    try:
        problem = Problem(128, config.tile_rows // HEADS, HEADS, kv=config.kv)
        problem.ours(plan_for(config, arch, sms))[0]()
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may not fit this GPU: the sweep leaves it out
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


class Sweep:
    """Timings so far, and the time that is left."""

    def __init__(self, arch: str, sms: int, deadline: float) -> None:
        self.arch, self.sms, self.deadline = arch, sms, deadline
        self.raw: list[dict[str, Any]] = []
        self.problems: dict[tuple[int, int, str], Any] = {}

    def expired(self) -> bool:
        return time.monotonic() > self.deadline

    def score(self, config: KernelConfig) -> float:
        """Weighted mean of log us over the contexts; inf if wrong, failing or out of time."""
        total = 0.0
        times: dict[int, float] = {}
        try:
            for context, weight in CONTEXTS.items():
                if self.expired():
                    return math.inf
                times[context] = self.time_us(config, context)
                total += weight * math.log(times[context])
        except Exception as error:
            self.record(config, times, f"{type(error).__name__}: {str(error)[-200:]}")
            return math.inf
        self.record(config, times, "")
        return total / sum(CONTEXTS.values())

    def time_us(self, config: KernelConfig, context: int) -> float:
        from bench.mla_inputs import TOLERANCE, Problem

        key = (context, config.tile_rows // HEADS, config.kv)
        if key not in self.problems:
            self.problems[key] = Problem(context, key[1], HEADS, kv=config.kv)
        problem = self.problems[key]
        problem.outs.zero_()
        samples = harness.graph_time_us(
            problem.ours(plan_for(config, self.arch, self.sms)), replays=12, warmup=2
        )
        if (error := problem.error()) > TOLERANCE:
            raise ValueError(f"wrong at context {context}: error {error:.3g}")
        return statistics.median(samples)

    def record(self, config: KernelConfig, times: dict[int, float], failure: str) -> None:
        self.raw.append({"config": msgspec.to_builtins(config), "us": times, "failure": failure})
        shown = " ".join(f"{us:7.2f}" for us in times.values())
        print(
            f"{config.kv} tile {config.tile_rows:2} {config.body:7} M{config.block_m} "
            f"N{config.block_n} C{config.chunks} W{config.warps} S{config.stages} "
            f"x{config.programs_per_sm} split {config.min_split_tokens:3} merge "
            f"{config.merge_columns}/{config.merge_splits}/{config.merge_warps}: {shown} {failure}",
            flush=True,
        )

    def best(self, tile_rows: int, kv: KvDtype) -> KernelConfig | None:
        """The fastest configuration found for a tile: bodies, then splits, then merge."""
        self.problems = {
            k: p for k, p in self.problems.items() if k[1:] == (tile_rows // HEADS, kv)
        }
        scores = {c: self.score(c) for c in candidates(self.arch, tile_rows, kv)}
        leaders = sorted(scores, key=lambda c: scores[c])[:2]
        for settings in (SPLIT_SETTINGS, MERGE_SETTINGS):
            for leader in leaders:
                for change in settings:
                    changed = msgspec.structs.replace(leader, **change)
                    scores[changed] = self.score(changed)
            leaders = sorted(scores, key=lambda c: scores[c])[:1]
        return leaders[0] if math.isfinite(scores[leaders[0]]) else None


def compile_all(
    configs: list[KernelConfig], arch: str, sms: int, workers: int, limit_s: float
) -> None:
    """Fill Triton's cache in parallel; what is late is compiled when it is timed."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    jobs = {pool.submit(warm, c, arch, sms): c for c in configs}
    try:
        for job in concurrent.futures.as_completed(jobs, timeout=limit_s):
            if failure := job.result():
                print("not compiled:", jobs[job], failure, flush=True)
    except concurrent.futures.TimeoutError:
        print(f"compiling stopped after {limit_s:.0f} s", flush=True)
    pool.shutdown(cancel_futures=True)


def merged(old: ArchTable, found: list[KernelConfig], gpu: str) -> ArchTable:
    """The section with new entries in place of those of the same tile and kv dtype."""
    new = {(c.kv, c.tile_rows): c for c in (*old.config, *found)}
    return msgspec.structs.replace(
        old, measured=True, gpu=gpu, date=datetime.date.today().isoformat(),
        commit=harness.commit(), config=tuple(new[key] for key in sorted(new)),
    )  # fmt: skip


def to_toml(table: dict[str, ArchTable]) -> str:
    """The table file; tomllib only reads."""
    lines = ["# Written by bench/tune_mla_verify.py; sections with measured = false by hand."]
    for arch, section in table.items():
        values = msgspec.to_builtins(section)
        configs = values.pop("config")
        lines += ["", f"[{arch}]", *(f"{k} = {_toml(v)}" for k, v in values.items())]
        for config in configs:
            lines += ["", f"[[{arch}.config]]", *(f"{k} = {_toml(v)}" for k, v in config.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="time limit of the sweep")
    parser.add_argument("--table", type=pathlib.Path, required=True, help="file to write")
    parser.add_argument("--results", type=pathlib.Path, default=harness.RESULTS)
    parser.add_argument("--kv", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--tiles", nargs="+", type=int, default=list(TILE_ROWS))
    parser.add_argument("--workers", type=int, default=12, help="compiling processes")
    wanted = parser.parse_args(arguments)
    deadline = time.monotonic() + wanted.seconds

    import torch

    properties = torch.cuda.get_device_properties(0)
    arch = arch_name(torch.cuda.get_device_capability())
    sms = properties.multi_processor_count
    tiles = [(tile, kv) for kv in wanted.kv for tile in wanted.tiles]
    bodies = [c for tile, kv in tiles for c in candidates(arch, tile, kv)]
    compile_all(bodies, arch, sms, wanted.workers, wanted.seconds / 2)
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    sweep = Sweep(arch, sms, deadline)
    found = [best for tile, kv in tiles if (best := sweep.best(tile, kv)) is not None]
    table = load_table()
    table[arch] = merged(table[arch], found, properties.name)
    wanted.table.parent.mkdir(parents=True, exist_ok=True)
    wanted.table.write_text(to_toml(table))
    summary = {f"tile{c.tile_rows}.{c.kv}.min_split_tokens": c.min_split_tokens for c in found}
    path = harness.write_result(
        "mla_verify", f"tune-{arch}", summary=summary, samples={"timed": sweep.raw},
        folder=wanted.results,
    )  # fmt: skip
    print(f"chosen: {found}\nwrote {wanted.table} and {path}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
