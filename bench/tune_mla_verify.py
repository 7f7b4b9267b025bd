"""Measure MLA verify configurations on this GPU and write its section of the table.

    python -m bench.tune_mla_verify --seconds 150 --table kernels/tables/mla_verify.toml

Configurations are compiled by worker processes into Triton's cache, checked against an fp32
reference, then timed in a CUDA graph: every body at its default split with one request, split and
merge settings of the two best, and the leaders with batches. What the time limit cuts off keeps
its previous entry.
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
from bench.mla_candidates import (
    HEADS,
    MERGE_SETTINGS,
    SPLIT_SETTINGS,
    TILE_ROWS,
    candidates,
)
from fastverify.attention.plan import ArchTable, KernelConfig, KvDtype, arch_name, fit, load_table

# (batch, context) -> weight. Each ratio counts, so no cell drowns another; the weights say what
# serving meets most.
SINGLE = {(1, 512): 1.0, (1, 4096): 1.5, (1, 16384): 1.5, (1, 32768): 1.0, (1, 131072): 1.0}
BATCHES = {(8, 4096): 0.75, (48, 512): 0.5}
CELLS = SINGLE | BATCHES
MAX_CONTEXT = 131072 + 64
# Configurations of a tile that are also timed with batches.
LEADERS = 3


def plan_for(config: KernelConfig, arch: str, sms: int, batch: int) -> Any:
    return fit(
        config, arch=arch, sms=sms, heads=HEADS, rows=config.tile_rows // HEADS, batch=batch,
        max_context=MAX_CONTEXT, pdl=load_table()[arch].pdl,
    )  # fmt: skip


def warm(config: KernelConfig, arch: str, sms: int, batch: int) -> str:
    """Compile a configuration by running it once; runs in a worker process."""
    import torch

    from bench.mla_inputs import Problem

    try:
        problem = Problem(128, config.tile_rows // HEADS, HEADS, batch, kv=config.kv)
        problem.ours(plan_for(config, arch, sms, batch))[0]()
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may not fit this GPU: the sweep leaves it out
        return f"{type(error).__name__}: {str(error)[-200:]}"
    return ""


class Sweep:
    """Timings so far, and the time that is left."""

    def __init__(self, arch: str, sms: int, deadline: float) -> None:
        self.arch, self.sms, self.deadline = arch, sms, deadline
        self.times: dict[KernelConfig, dict[tuple[int, int], float]] = {}
        self.failures: dict[KernelConfig, str] = {}
        self.problems: dict[tuple[Any, ...], Any] = {}

    def measure(self, config: KernelConfig, cells: dict[tuple[int, int], float]) -> None:
        """Time what is missing of these cells; stops at the first failure or the deadline."""
        times = self.times.setdefault(config, {})
        wanted = [cell for cell in cells if cell not in times]
        if not wanted or config in self.failures:
            return
        for batch, context in wanted:
            if time.monotonic() > self.deadline:
                return
            try:
                times[batch, context] = self.time_us(config, batch, context)
            except Exception as error:  # wrong or beyond this GPU: it cannot win
                self.failures[config] = f"{type(error).__name__}: {str(error)[-160:]}"
                break
        print(describe(config, times, self.failures.get(config, "")), flush=True)

    def time_us(self, config: KernelConfig, batch: int, context: int) -> float:
        from bench.mla_inputs import TOLERANCE, Problem

        key = (config.tile_rows, config.kv, batch, context)
        if key not in self.problems:
            # One tile's inputs at a time: the pools of all would not fit beside each other.
            self.problems = {k: p for k, p in self.problems.items() if k[:2] == key[:2]}
            rows = config.tile_rows // HEADS
            self.problems[key] = Problem(context, rows, HEADS, batch, kv=config.kv)
        problem = self.problems[key]
        problem.outs.zero_()
        samples = harness.graph_time_us(
            problem.ours(plan_for(config, self.arch, self.sms, batch)), replays=12, warmup=2
        )
        if (error := problem.error()) > TOLERANCE:
            raise ValueError(f"wrong at batch {batch} context {context}: error {error:.3g}")
        return statistics.median(samples)

    def score(self, config: KernelConfig, cells: dict[tuple[int, int], float]) -> float:
        """Weighted mean of log us over the cells; inf unless all were timed."""
        times = self.times.get(config, {})
        if config in self.failures or any(cell not in times for cell in cells):
            return math.inf
        return sum(w * math.log(times[c]) for c, w in cells.items()) / sum(cells.values())

    def ranked(
        self, tile_rows: int, kv: str, cells: dict[tuple[int, int], float]
    ) -> list[KernelConfig]:
        """Configurations of a tile with all these cells timed, fastest first."""
        scores = {
            c: score
            for c in self.times
            if (c.tile_rows, c.kv) == (tile_rows, kv)
            and math.isfinite(score := self.score(c, cells))
        }
        return sorted(scores, key=lambda c: scores[c])

    def refine(self, tile_rows: int, kv: str) -> None:
        """Split settings of the two best bodies, then merge settings of the best."""
        for settings, count in ((SPLIT_SETTINGS, 2), (MERGE_SETTINGS, 1)):
            for leader in self.ranked(tile_rows, kv, SINGLE)[:count]:
                for change in settings:
                    self.measure(msgspec.structs.replace(leader, **change), SINGLE)

    def leaders(self, tile_rows: int, kv: str) -> list[KernelConfig]:
        """The fastest configuration of each body, the fastest bodies first."""
        best: dict[tuple[Any, ...], KernelConfig] = {}
        for config in self.ranked(tile_rows, kv, SINGLE):
            shape = (config.body, config.block_m, config.block_n, config.chunks, config.stages)
            best.setdefault(shape, config)
        return list(best.values())[:LEADERS]

    def raw(self) -> list[dict[str, Any]]:
        return [
            {
                "config": msgspec.to_builtins(config),
                "us": {f"batch{b}.ctx{c}": us for (b, c), us in times.items()},
                "failure": self.failures.get(config, ""),
            }
            for config, times in self.times.items()
        ]


def describe(config: KernelConfig, times: dict[tuple[int, int], float], failure: str) -> str:
    shown = " ".join(f"{times[cell]:6.1f}" if cell in times else "     -" for cell in CELLS)
    return (
        f"{config.kv} {config.tile_rows:3} {config.body:7} M{config.block_m} N{config.block_n} "
        f"C{config.chunks} W{config.warps} S{config.stages} x{config.programs_per_sm} "
        f"{config.min_split_tokens:3} {config.merge_columns:3}/{config.merge_splits:3}/"
        f"{config.merge_warps}: {shown} {failure}"
    )


def compile_all(
    pool: concurrent.futures.Executor,
    configs: list[KernelConfig],
    batches: list[int],
    arch: str,
    sms: int,
    limit_s: float,
) -> None:
    """Fill Triton's cache in parallel; what is late is compiled when it is timed."""
    jobs = {pool.submit(warm, c, arch, sms, batch): c for c in configs for batch in batches}
    try:
        for job in concurrent.futures.as_completed(jobs, timeout=max(1.0, limit_s)):
            if failure := job.result():
                print("not compiled:", describe(jobs[job], {}, failure), flush=True)
    except concurrent.futures.TimeoutError:
        print(f"compiling stopped after {limit_s:.0f} s", flush=True)
        for job in jobs:
            job.cancel()


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


def search(
    sweep: Sweep, pool: concurrent.futures.Executor, tiles: list[tuple[int, KvDtype]]
) -> list[KernelConfig]:
    """The fastest configuration of each tile, where there is one."""
    arch, sms = sweep.arch, sweep.sms

    def left_s() -> float:
        return sweep.deadline - time.monotonic()

    bodies = [c for tile, kv in tiles for c in candidates(arch, tile, kv)]
    compile_all(pool, bodies, [1], arch, sms, left_s() / 2)
    print(f"compiled, {left_s():.0f} s left; us at (batch, context) {list(CELLS)}", flush=True)
    for config in bodies:
        sweep.measure(config, SINGLE)
    leaders = [c for tile, kv in tiles for c in sweep.leaders(tile, kv)]
    compile_all(pool, leaders, [b for b, _ in BATCHES], arch, sms, left_s() / 2)
    for config in leaders:
        sweep.measure(config, CELLS)
    found = []
    for tile, kv in tiles:
        sweep.refine(tile, kv)
        for config in sweep.ranked(tile, kv, SINGLE)[:LEADERS]:
            sweep.measure(config, CELLS)
        # Batches decide where time allowed them, one request alone otherwise.
        for cells in (CELLS, SINGLE):
            if ranked := sweep.ranked(tile, kv, cells):
                found.append(ranked[0])
                break
    return found


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
    sweep = Sweep(arch, properties.multi_processor_count, deadline)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(wanted.workers, mp_context=context) as pool:
        found = search(sweep, pool, [(tile, kv) for kv in wanted.kv for tile in wanted.tiles])
    table = load_table()
    table[arch] = merged(table[arch], found, properties.name)
    wanted.table.parent.mkdir(parents=True, exist_ok=True)
    wanted.table.write_text(to_toml(table))
    summary = {f"tile{c.tile_rows}.{c.kv}.min_split_tokens": c.min_split_tokens for c in found}
    path = harness.write_result(
        "mla_verify", f"tune-{arch}", summary=summary, samples={"timed": sweep.raw()},
        folder=wanted.results,
    )  # fmt: skip
    print(f"chosen: {found}\nwrote {wanted.table} and {path}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
