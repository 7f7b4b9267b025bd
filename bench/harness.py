"""What every bench shares: graph timing on a GPU, and the result file.

A result file is `bench/results/BENCH-WHAT-DATE.json` with the keys `bench`, `command`, `commit`,
`machine`, `versions`, `samples` and `summary`; `summary` is flat, name -> number.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sglang-kernel", "nvidia-nccl-cu13")


class Captured(NamedTuple):
    """A captured graph and what its last call returned, which every replay writes again."""

    graph: Any
    output: Any


def capture(calls: Sequence[Callable[[], Any]]) -> Captured:
    """Capture calls, in order, into one CUDA graph after running each once.

    Give several calls, over rotating inputs, so that their data exceeds the L2 cache and one
    replay is long against the launch.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    output = None
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            output = call()
    return Captured(graph, output)


def replay_us(graph: Any, replays: int) -> list[float]:
    """Replay graph and return the time of each replay in us."""
    import torch

    starts = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [s.elapsed_time(e) * 1000.0 for s, e in zip(starts, ends, strict=True)]


def replays_within(once_us: float, budget_s: float, most: int) -> int:
    """How many replays of once_us fit the budget: at least 5, at most `most`."""
    return max(5, min(most, int(budget_s * 1e6 / max(once_us, 1.0))))


def time_graph_us(
    graph: Any, *, replays: int = 50, warmup: int = 5, budget_s: float | None = None
) -> list[float]:
    """Times of one replay in us; a budget lowers the replays of a long graph, not below 5."""
    if budget_s is not None:
        replays = replays_within(replay_us(graph, 1)[0], budget_s, replays)
        warmup = min(warmup, replays // 5)
    replay_us(graph, warmup)
    return replay_us(graph, replays)


def graph_time_us(
    calls: Sequence[Callable[[], Any]],
    *,
    replays: int = 50,
    warmup: int = 5,
    budget_s: float | None = None,
) -> list[float]:
    """Time of one call inside a captured CUDA graph, one sample per replay.

    Returns replay time / len(calls) in us. See `capture` for calls, `time_graph_us` for budget_s.
    """
    graph = capture(calls).graph
    times = time_graph_us(graph, replays=replays, warmup=warmup, budget_s=budget_s)
    return [us / len(calls) for us in times]


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the 10th and the 90th percentile."""
    if len(samples) < 2:
        return samples[0], 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), (deciles[-1] - deciles[0]) / 2


def versions() -> dict[str, str]:
    """Installed versions of the packages whose numbers a bench reports."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """GPU names, driver, clocks and power limit, as NVML reports them now."""
    import pynvml

    pynvml.nvmlInit()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
            }
        )
    return {"gpus": gpus, "driver": pynvml.nvmlSystemGetDriverVersion()}


def commit() -> str:
    """Short hash of HEAD, `+dirty` when the tree differs, or `unknown` outside git."""

    def git(*args: str) -> str:
        try:
            done = subprocess.run(("git", *args), capture_output=True, text=True, timeout=20)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        # A copy of the tree on another machine has no git: its sender names the commit.
        return os.environ.get("FASTVERIFY_COMMIT", "unknown")
    return head + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def write_result(
    bench: str,
    what: str,
    *,
    summary: dict[str, float],
    samples: dict[str, Any],
    folder: pathlib.Path = RESULTS,
) -> pathlib.Path:
    """Write `BENCH-WHAT-DATE.json` into folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}-{what}-{datetime.date.today().isoformat()}.json"
    body = {
        "bench": bench,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "samples": samples,
        "summary": summary,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path
