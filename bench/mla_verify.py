"""MLA verify attention per layer: ours beside SGLang's Triton kernel and FlashInfer, one run.

    python -m bench.mla_verify --seconds 90
    python -m bench.mla_verify --quick        ours alone, after a change; writes no result

Every contender reads the same pools, rotated beyond the L2 cache, inside a CUDA graph, and its
output is compared with an fp32 reference before and after timing. FlashInfer's host plan is made
beforehand and not counted, SGLang's mask and indices likewise. `copy_rate` is the time the
keys would take at the rate of a large copy measured in the same run: a guide, not a bound.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import harness
from bench.mla_inputs import SM_SCALE, TOLERANCE, Call, Problem, replays_for
from fastverify.attention.plan import LATENT, ROPE, arch_name, plan

HEADS = 8
CONTEXTS = (512, 4096, 16384, 32768, 131072)
# (rows, batch, contexts): what the summary needs comes first, in case time runs out.
SERIES = (
    (4, 1, CONTEXTS),
    (2, 1, CONTEXTS),
    (8, 1, CONTEXTS),
    (4, 4, (512, 4096, 32768)),
    (4, 16, (512, 4096, 16384)),
    (4, 48, (512, 4096)),
)


def fastverify_calls(problem: Problem) -> list[Call]:
    properties = torch.cuda.get_device_properties(0)
    made = plan(
        arch=arch_name(torch.cuda.get_device_capability()),
        sms=properties.multi_processor_count, heads=problem.heads, rows=problem.rows,
        batch=problem.batch, max_context=max(CONTEXTS) + 64, kv=problem.kv,
    )  # fmt: skip
    if made is None:
        raise RuntimeError("no plan for this GPU")
    return problem.ours(made)


def triton_calls(problem: Problem) -> list[Call]:
    """SGLang's default verify kernel, with the FULL_MASK it builds for a chain."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    batch, rows, context = problem.batch, problem.rows, problem.context
    slots = problem.slots(torch.int64)
    indices = slots[:, :context].flatten()
    new = slots[:, context:].flatten()
    steps = torch.arange(batch + 1, device="cuda")
    qo, kv_indptr = (steps * rows).to(torch.int32), (steps * context).to(torch.int32)
    row = torch.arange(rows, device="cuda")[:, None]
    mask = torch.arange(problem.total, device="cuda")[None, :] <= context + row
    masks = mask.expand(batch, -1, -1).flatten()
    mask_indptr = steps * (rows * problem.total)
    calls: list[Call] = []
    for pool, out in zip(problem.pools, problem.outs, strict=True):
        k = pool[new]
        calls.append(
            functools.partial(
                extend_attention_fwd, problem.q, k, k[..., :LATENT].contiguous(), out, pool,
                pool[..., :LATENT], qo, kv_indptr, indices, masks, True, mask_indptr, rows,
                1.0, 1.0, sm_scale=SM_SCALE,
            )
        )  # fmt: skip
    return calls


def flashinfer_calls(problem: Problem, backend: str) -> list[Call]:
    """FlashInfer's MLA wrapper, planned once; as SGLang calls it, on views of the pool."""
    import flashinfer

    batch, rows, total = problem.batch, problem.rows, problem.total
    steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend=backend
    )
    wrapper.plan(
        steps * rows, steps * total, problem.slots(torch.int32).flatten(),
        torch.full((batch,), total, dtype=torch.int32, device="cuda"),
        problem.heads, LATENT, ROPE, 1, True, SM_SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    q, q_rope = problem.q[..., :LATENT].contiguous(), problem.q[..., LATENT:].contiguous()
    return [
        functools.partial(wrapper.run, q, q_rope, pool[..., :LATENT], pool[..., LATENT:], out=out)
        for pool, out in zip(problem.pools, problem.outs, strict=True)
    ]


CONTENDERS: dict[str, Callable[[Problem], list[Call]]] = {
    "fastverify": fastverify_calls,
    "flashinfer_fa2": functools.partial(flashinfer_calls, backend="fa2"),
    "flashinfer_fa3": functools.partial(flashinfer_calls, backend="fa3"),
    "triton": triton_calls,
}


def measure(problem: Problem, name: str) -> dict[str, Any]:
    """Samples of one contender, or why there are none."""
    try:
        calls = CONTENDERS[name](problem)
        problem.outs.zero_()
        for call in calls:
            call()
        before = problem.error()
        if before > TOLERANCE:
            return {"failure": f"wrong before timing: error {before:.3g}"}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[0]()
        end.record()
        torch.cuda.synchronize()
        replays = replays_for(start.elapsed_time(end) * 1000, len(calls))
        problem.outs.zero_()
        samples = harness.graph_time_us(calls, replays=replays, warmup=2)
        after = problem.error()
    except Exception as error:  # one contender failing must not lose the others
        return {"failure": f"{type(error).__name__}: {str(error)[:300]}"}
    if after > TOLERANCE:
        return {"failure": f"wrong after timing: error {after:.3g}"}
    return {"us": samples, "error_before": before, "error_after": after}


def copy_bytes_per_us(size_bytes: int = 1 << 30) -> float:
    """Bytes read and written per us by a copy far larger than L2.

    16-byte elements: a copy of single bytes reaches two thirds of the rate.
    """
    source = torch.empty(size_bytes // 16, dtype=torch.complex128, device="cuda")
    target = torch.empty_like(source)
    samples = harness.graph_time_us([functools.partial(target.copy_, source)] * 3, replays=8)
    return 2 * size_bytes / min(samples)


def plot(summary: dict[str, float], path: pathlib.Path) -> None:
    """us over context at 4 rows, batch 1, beside the time a copy takes for the keys."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in (*CONTENDERS, "copy_rate"):
        points = [(c, summary.get(f"us.ctx{c}.rows4.{name}")) for c in CONTEXTS]
        known = [(c, us) for c, us in points if us is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "--" if name == "copy_rate" else "o-", label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="context, tokens", ylabel="us per layer",
        title=f"MLA verify, 4 rows, {HEADS} heads, batch 1, {torch.cuda.get_device_name()}",
    )  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130, bbox_inches="tight")


def key_of(context: int, rows: int, batch: int, name: str) -> str:
    return f"us.ctx{context}.rows{rows}.{'' if batch == 1 else f'batch{batch}.'}{name}"


def run_all(
    deadline: float, kv: str, contenders: tuple[str, ...]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Everything of SERIES that the time allows."""
    summary: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    bandwidth = copy_bytes_per_us()
    summary["copy.gb_per_s"] = bandwidth / 1000
    print("rows batch context copy rate " + " ".join(f"{n:>15}" for n in contenders), flush=True)
    for rows, batch, contexts in SERIES:
        for context in contexts:
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                return summary, samples
            problem = Problem(context, rows, HEADS, batch, kv=kv)  # type: ignore[arg-type]
            at_copy_rate = problem.kv_bytes / bandwidth
            summary[key_of(context, rows, batch, "copy_rate")] = at_copy_rate
            cells = []
            for name in contenders:
                got = measure(problem, name)
                samples.append(
                    {"context": context, "rows": rows, "batch": batch, "name": name, **got}
                )
                if "us" in got:
                    median, spread = harness.median_and_spread(got["us"])
                    summary[key_of(context, rows, batch, name)] = median
                    cells.append(f"{median:9.2f}+-{spread:4.1f}")
                else:
                    cells.append(f"{'failed':>15}")
                    print(name, got["failure"], flush=True)
            print(
                f"{rows:4} {batch:5} {context:7} {at_copy_rate:9.2f} " + " ".join(cells), flush=True
            )
            del problem
    return summary, samples


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit")
    parser.add_argument("--results", type=pathlib.Path, default=harness.RESULTS)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--quick", action="store_true", help="only ours; print, write nothing")
    wanted = parser.parse_args(arguments)
    # Nobody else reads fp8 keys in this layout.
    alone = wanted.quick or wanted.kv == "fp8"
    contenders = ("fastverify",) if alone else tuple(CONTENDERS)
    summary, samples = run_all(time.monotonic() + wanted.seconds, wanted.kv, contenders)
    if wanted.quick:
        return 0
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    path = harness.write_result(
        "mla_verify", f"{gpu}-{wanted.kv}", summary=summary, samples={"timed": samples},
        folder=wanted.results,
    )  # fmt: skip
    plot(summary, path.with_suffix(".png"))
    print(f"wrote {path} and its plot")
    return 0


if __name__ == "__main__":
    sys.exit(main())
