"""Verify latency per layer, measured: `python -m bench.verify_latency --model kimi-k2.5 --tp 8`.

One rank of TP=N as SGLang's own modules, with random weights of the real shapes. Each part runs
in a captured graph over all layers; the step is the model's own forward as one graph. One result
file for each attention backend, rewritten as cells arrive. Without a GPU, `--model tiny` runs the
same code on the CPU as a smoke test and writes nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import time
from typing import Any

import msgspec
import torch

from bench import cli, harness, layer_attention, layer_runner, layer_table, shapes
from bench.layer_measure import Rank, measure_cell, reason, warm
from bench.layer_parts import expert_runner
from bench.layer_print import print_tables
from bench.layer_scale import part_bytes
from bench.layer_table import Cell, Depth
from fastverify.errors import ConfigError, FastverifyError

ATTENTION = ("triton", "flashinfer", "fastverify")
CPU_ATTENTION = "intel_amx"
MOE = ("marlin", "triton")
# The rows that decide whether verify pays come first, in case time runs out.
FIRST_ROWS = (1, 3)
MIN_CONTEXT_LENGTH = 8192
LOAD_LIMIT_S = 420
SMOKE_NOTE = "smoke test on a CPU: these times mean nothing; nothing written."


class Options(msgspec.Struct, frozen=True):
    """The command line, checked."""

    shape: shapes.Shape
    tp: int
    layers: int
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    batch: int
    attention: tuple[str, ...]
    moe: str
    seconds: float

    @property
    def depth(self) -> Depth:
        """Layers that are measured."""
        return Depth(self.layers, self.shape.first_k_dense_replace)

    @property
    def full(self) -> Depth:
        """Layers of the whole model."""
        return Depth(self.shape.num_hidden_layers, self.shape.first_k_dense_replace)

    @property
    def slots(self) -> int:
        """KV slots for the longest cell, with the unused slot 0."""
        return self.batch * (max(self.contexts) + max(self.rows)) + 64


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="bench.verify_latency", description=__doc__)
    parser.add_argument("--model", default="tiny", help=", ".join(shapes.MODELS))
    parser.add_argument("--tp", type=int, default=None, help="ranks of which one is measured")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has")
    parser.add_argument("--contexts", default=None, help="cached tokens, by default 512,...,32768")
    parser.add_argument("--rows", default=None, help="1 is plain decode; default 1,2,3,4,6,8")
    parser.add_argument("--batch", type=int, default=1, help="requests")
    parser.add_argument("--attention", default=",".join(ATTENTION))
    parser.add_argument("--moe", default="marlin", help="runner of the INT4 experts")
    parser.add_argument("--seconds", type=float, default=150, help="for measuring, after loading")
    return parser


def parse(argv: list[str] | None = None) -> Options:
    """Command line to Options; ConfigError in one sentence on bad input."""
    args = parser().parse_args(argv)
    shape = shapes.shape(args.model)
    on_gpu = layer_runner.device() == "cuda"
    if not on_gpu and args.model != "tiny":
        raise ConfigError(
            f"--model {args.model} needs a CUDA GPU and none is visible here: run --model tiny,"
            " the smoke test, or use a machine with a GPU."
        )
    small = args.model == "tiny"
    contexts = args.contexts or ("64,256" if small else "512,4096,16384,32768")
    rows = args.rows or ("1,3" if small else "1,2,3,4,6,8")
    if not 1 <= args.batch <= 64:
        raise ConfigError(f"--batch {args.batch}: give 1 to 64 requests.")
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds:g}: give a positive number.")
    options = Options(
        shape=shape,
        tp=args.tp or (1 if small else 8),
        layers=args.layers or shape.num_hidden_layers,
        contexts=cli.int_list(contexts, "--contexts", 1, 1 << 20),
        rows=cli.int_list(rows, "--rows", 1, 16),
        batch=args.batch,
        attention=cli.name_list(args.attention, "--attention", ATTENTION)
        if on_gpu
        else (CPU_ATTENTION,),
        moe=cli.name_list(args.moe, "--moe", MOE)[0],
        seconds=args.seconds,
    )
    shapes.check_division(shape, options.tp, options.layers)
    shapes.check_context(shape, options.contexts, options.rows)
    if options.batch * max(options.rows) > shape.vocab_size // options.tp:
        raise ConfigError(f"--batch {options.batch}: more rows than the vocabulary has tokens.")
    return options


def plan(options: Options) -> list[Cell]:
    """All cells, the deciding rows of every context and backend first."""
    order = [r for r in FIRST_ROWS if r in options.rows]
    rest = [r for r in options.rows if r not in order]
    return [
        Cell(name, context, rows, options.batch)
        for group in (order, rest)
        for context in options.contexts
        for rows in group
        for name in options.attention
    ]


def load(options: Options) -> Rank:
    """The rank, loaded and frozen against garbage collection during captures."""
    if layer_runner.device() == "cuda":
        layer_runner.check_memory(options.shape, options.tp, options.layers, options.slots)
    runner = layer_runner.build_runner(
        options.shape,
        options.tp,
        options.layers,
        tokens=options.slots,
        context=min(
            options.shape.max_position_embeddings,
            max(MIN_CONTEXT_LENGTH, max(options.contexts) + 64),
        ),
        slots=options.batch + 1,
        # On SM90 and SM120 SGLang's own choice for INT4 experts is Marlin.
        moe="triton" if options.moe == "triton" and options.shape.int4 else "auto",
    )
    gc.collect()
    gc.freeze()
    return Rank(runner, runner.attn_backend, options.batch)


def backends(rank: Rank, options: Options) -> tuple[dict[str, Any], dict[str, str]]:
    """Attention backends that run here, and the reason of each that declined."""
    ready: dict[str, Any] = {}
    declined: dict[str, str] = {}
    for name in options.attention:
        try:
            ready[name] = layer_attention.attention_backend(
                rank.runner, name, max(2, *options.rows), options.batch
            )
        except ConfigError as error:
            declined[name] = str(error)
        except Exception as error:  # a contender that breaks must not cost the others
            declined[name] = reason(error)
    return ready, declined


def warm_all(rank: Rank, options: Options, ready: dict[str, Any]) -> None:
    """Compile what any cell will launch, before the clock of --seconds starts."""
    start = time.monotonic()
    for name, backend in ready.items():
        rank.backend = backend
        for rows in options.rows:
            try:
                warm(rank, min(options.contexts), rows)
            except Exception as error:  # the cell will say it again, and count it
                print(f"{name}, {rows} rows: warm-up failed: {reason(error)}", file=sys.stderr)
    print(f"kernels ready after {time.monotonic() - start:.0f} s", file=sys.stderr)


def cached_parts(options: Options) -> list[str]:
    """Parts whose weights over all measured layers stay in the GPU's L2 cache."""
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    reads = part_bytes(
        options.shape,
        options.tp,
        context=0,
        batch=options.batch,
        experts=options.shape.num_experts_per_tok,
    )
    rotating = ("qkv_proj", "out_proj", "router", "experts", "shared_expert")
    return [part for part in rotating if reads[part] * options.layers < 2 * cache_bytes]


def measure(rank: Rank, options: Options, cells: list[Cell], ready: dict[str, Any]) -> None:
    """Measure cells in order until the time is up, saving as it goes."""
    end = time.monotonic() + options.seconds
    wanted = [cell for cell in cells if cell.attention in ready]

    def label(cell: Cell) -> str:
        return f"{cell.attention}, context {cell.context}, {cell.rows} rows"

    saved = 0
    for count, cell in enumerate(cli.progress(wanted, label, len(wanted)), 1):
        if time.monotonic() > end:
            cell.failed["all"] = f"not reached within --seconds {options.seconds:g}"
            continue
        rank.backend = ready[cell.attention]
        try:
            measure_cell(rank, cell)
        except Exception as error:
            cell.failed["all"] = reason(error)
        if rank.on_gpu and count - saved >= 2 * len(ready):
            save(options, cells)
            saved = count


def save(options: Options, cells: list[Cell]) -> list[str]:
    """Write one result file for each attention backend that has a number; their paths."""
    paths = []
    for name in options.attention:
        own = [cell for cell in cells if cell.attention == name]
        numbers = layer_table.summary(own, options.depth, options.full)
        if not numbers:
            continue
        what = f"{options.shape.name}-tp{options.tp}-{name}"
        what += f"-{options.moe}moe" if options.moe != "marlin" else ""
        what += f"-{options.layers}layers" if options.depth != options.full else ""
        what += f"-batch{options.batch}" if options.batch != 1 else ""
        samples = {"options": msgspec.to_builtins(options), "cells": msgspec.to_builtins(own)}
        path = harness.write_result("verify_latency", what, summary=numbers, samples=samples)
        paths.append(str(path))
    return paths


def main() -> int:
    """Run the bench; 0 when something was measured."""
    options = parse()
    on_gpu = layer_runner.device() == "cuda"
    faulthandler.dump_traceback_later(options.seconds + LOAD_LIMIT_S, exit=True)
    if not on_gpu:
        torch.set_num_threads(1)
    print(f"{options.shape.name}, one rank of TP={options.tp}, {options.layers} layers")
    if options.shape.note:
        print(f"measured as: {options.shape.note}")
    cells = plan(options)
    start = time.monotonic()
    try:
        rank = load(options)
    except ImportError as error:
        if on_gpu:
            raise
        print(f"SGLang does not start on this CPU ({error}); {len(cells)} cells planned.")
        print(SMOKE_NOTE)
        return 0
    print(
        f"experts: {expert_runner(rank.runner.model)}; loaded in {time.monotonic() - start:.0f} s"
    )
    ready, declined = backends(rank, options)
    warm_all(rank, options, ready)
    if on_gpu and (small := cached_parts(options)):
        print(f"in L2 between replays at {options.layers} layers: {', '.join(small)}")
    try:
        measure(rank, options, cells, ready)
    finally:
        print_tables(cells, options.depth, declined)
        if on_gpu:
            for path in save(options, cells):
                print(f"written: {path}", file=sys.stderr)
        else:
            print(SMOKE_NOTE)
    if not any(cell.step for cell in cells):
        raise FastverifyError("nothing could be measured; the reasons are above.")
    return 0


if __name__ == "__main__":
    cli.run(main)
