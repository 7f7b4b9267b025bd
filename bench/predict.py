"""What one rank's measured parts mean for a PCIe machine: `python -m bench.predict`.

Measured parts of one rank, moved to another GPU's memory bandwidth, plus a collective time, give
verify ms, tokens per second by accept length and both break-evens. Every figure is marked:
measured, scaled (measured on another GPU, its memory share stretched) or modelled (published
numbers only). Without a result file, `--modelled` prints the model alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import msgspec

from bench import cli, pcie_model, shapes
from bench.layer_scale import Compute, measured_compute, part_bytes
from bench.pcie_model import Collective
from fastverify.errors import ConfigError

BASELINE_TOK_S = 82.0
# Datasheet memory bandwidth in TB/s.
BANDWIDTH_TB_S = {
    "rtx-pro-6000": 1.79,
    "h200": 4.8,
    "h100": 3.35,
    "b200": 8.0,
    "rtx-5090": 1.79,
}


class Prediction(msgspec.Struct, frozen=True):
    """One line of the table; tok_s by accept length, None where it exceeds the rows.

    kind: where compute, all-reduce and draft time are from, in that order.
    """

    collective: str
    rows: int
    all_reduce_us: float
    decode_ms: float
    verify_ms: float
    iteration_ms: float
    tok_s: dict[float, float | None]
    break_even_baseline: float
    break_even_own: float
    kind: str


def step_ms(compute: Compute, collective: Collective, rows: int, hidden: int, layers: int) -> float:
    """A step with its collectives: two a layer, of which all but the last can fuse the norm."""
    count = 2 * layers
    reduced = count * collective.time_us(rows * hidden * 2) / 1000
    taken_over = compute.norms_ms * (count - 1) / count if collective.fused else 0.0
    return compute.ms - taken_over + reduced


def predict(
    compute: dict[int, Compute],
    collective: Collective,
    *,
    hidden: int,
    layers: int,
    accept: tuple[float, ...],
    baseline_tok_s: float = BASELINE_TOK_S,
) -> list[Prediction]:
    """Predictions for every verify width in compute, which must hold the decode step, rows 1."""
    decode = step_ms(compute[1], collective, 1, hidden, layers)
    out = []
    for rows in sorted(r for r in compute if r > 1):
        verify = step_ms(compute[rows], collective, rows, hidden, layers)
        iteration = verify + pcie_model.draft_ms(rows)
        out.append(
            Prediction(
                collective=collective.name,
                rows=rows,
                all_reduce_us=collective.time_us(rows * hidden * 2),
                decode_ms=decode,
                verify_ms=verify,
                iteration_ms=iteration,
                tok_s={a: 1000 * a / iteration if a <= rows else None for a in accept},
                break_even_baseline=iteration * baseline_tok_s / 1000,
                break_even_own=iteration / decode,
                kind=f"{compute[rows].kind}/{collective.kind}/modelled",
            )
        )
    return out


def read_result(path: pathlib.Path) -> dict[str, Any]:
    """A verify_latency result file; ConfigError when it is none."""
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result file ({error}): pass one of bench/results.") from (
            error
        )
    if body.get("bench") != "verify_latency":
        raise ConfigError(f"{path} is of bench {body.get('bench')!r}: pass a verify_latency file.")
    return dict(body)


def source_bandwidth(body: dict[str, Any]) -> float:
    """Datasheet TB/s of the GPU that a result file names; ConfigError when it is unknown."""
    name = body["machine"]["gpus"][0]["name"]
    plain = name.lower().replace(" ", "-")
    found = [tb_s for gpu, tb_s in BANDWIDTH_TB_S.items() if gpu in plain]
    if not found:
        raise ConfigError(f"no memory bandwidth known for {name!r}: pass --source-tb-s.")
    return found[0]


def compute_by_rows(
    body: dict[str, Any], context: int, source_tb_s: float, tb_s: float
) -> dict[int, Compute]:
    """Compute times of every row count that a result file holds at one context."""
    options = body["samples"]["options"]
    shape = msgspec.convert(options["shape"], type=shapes.Shape)
    out = {}
    for cell in body["samples"]["cells"]:
        prefix = f"layer_us.ctx{context}.rows{cell['rows']}."
        parts = {
            key.removeprefix(prefix): us
            for key, us in body["summary"].items()
            if key.startswith(prefix)
        }
        if cell["context"] != context or "unattributed" not in parts:
            continue
        reads = part_bytes(
            shape,
            options["tp"],
            context=context,
            batch=options["batch"],
            experts=cell["distinct_experts"],
        )
        out[cell["rows"]] = measured_compute(
            parts,
            reads,
            layers=shape.num_hidden_layers,
            dense=shape.first_k_dense_replace,
            source_tb_s=source_tb_s,
            tb_s=tb_s,
        )
    if 1 not in out or len(out) < 2:
        raise ConfigError(
            f"the result holds no complete decode and verify cells at context {context}: measure"
            " rows 1 and 3 there first."
        )
    return out


def modelled_compute(case: str) -> dict[int, Compute]:
    """Compute times from published numbers alone, for 8x RTX PRO 6000 at short context."""
    return {
        rows: Compute(pcie_model.compute_ms(case, rows), pcie_model.NORMS_MS, "modelled")
        for rows in (1, 2, 3, 4, 6, 8)
    }


def measured_collective(text: str) -> Collective:
    """`14336:7.1,43008:9.0`, bytes and us, to a collective that interpolates between the sizes."""
    try:
        pairs = sorted(tuple(float(n) for n in item.split(":")) for item in text.split(","))
        points = [(payload_bytes, us) for payload_bytes, us in pairs]
    except ValueError:
        points = []
    if len(points) < 2:
        raise ConfigError(
            f"--all-reduce-us {text!r}: give two or more BYTES:US, such as 14336:7.1,43008:9.0."
        )

    def time_us(payload_bytes: float) -> float:
        upper = next((i for i, p in enumerate(points[1:], 1) if p[0] >= payload_bytes), -1)
        second = points[upper]
        return pcie_model.line(points[points.index(second) - 1], second)(payload_bytes)

    return Collective("measured", time_us, False, "given on the command line", "measured")


def print_table(title: str, predictions: list[Prediction], accept: tuple[float, ...]) -> None:
    """Predictions as one table, with the kind of each number."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    names = ["collective", "rows", "us a call", "decode ms", "verify ms", "iteration ms"]
    for name in (*names, *(f"tok/s at {a:g}" for a in accept), "even at 82", "even own", "kind"):
        text = name in ("collective", "kind")
        table.add_column(name, justify="left" if text else "right", no_wrap=text)
    for p in predictions:
        numbers = (p.all_reduce_us, p.decode_ms, p.verify_ms, p.iteration_ms)
        speeds = ("-" if s is None else f"{s:.0f}" for s in p.tok_s.values())
        even = (f"{p.break_even_baseline:.2f}", f"{p.break_even_own:.2f}", p.kind)
        table.add_row(p.collective, str(p.rows), *(f"{n:.2f}" for n in numbers), *speeds, *even)
    Console(width=170).print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; ConfigError comes later, with the values."""
    parser = argparse.ArgumentParser(prog="bench.predict", description=__doc__)
    parser.add_argument("result", nargs="?", type=pathlib.Path, help="a verify_latency file")
    parser.add_argument("--modelled", choices=tuple(pcie_model.COMPUTE_MS))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--gpu", default="rtx-pro-6000", choices=tuple(BANDWIDTH_TB_S))
    parser.add_argument("--source-tb-s", type=float, help="of the GPU that measured")
    parser.add_argument("--all-reduce-us", help="measured: BYTES:US,BYTES:US")
    parser.add_argument("--accept", default="1.5,2,2.5,3")
    return parser.parse_args(argv)


def main() -> int:
    """Print the predictions of one result file, or of the model alone."""
    args = parse()
    accept = cli.float_list(args.accept, "--accept", 1.0, 16.0)
    if (args.result is None) == (args.modelled is None):
        raise ConfigError("give a verify_latency result file, or --modelled tuned or untuned.")
    collectives = [measured_collective(args.all_reduce_us)] if args.all_reduce_us else []
    if args.modelled:
        compute, hidden, layers = modelled_compute(args.modelled), 7168, 61
        title = f"modelled only, {args.modelled} NCCL baseline"
        # The other NCCL would contradict the baseline that the compute time was solved from.
        other = "untuned" if args.modelled == "tuned" else ""
        collectives += [c for c in pcie_model.COLLECTIVES if c.name != f"nccl-{other}"]
    else:
        body = read_result(args.result)
        source = args.source_tb_s or source_bandwidth(body)
        target = BANDWIDTH_TB_S[args.gpu]
        compute = compute_by_rows(body, args.context, source, target)
        whole = body["samples"]["options"]["shape"]
        hidden, layers = whole["hidden_size"], whole["num_hidden_layers"]
        title = f"{whole['name']}, context {args.context}, {source} -> {target} TB/s ({args.gpu})"
        collectives += list(pcie_model.COLLECTIVES)
    for one in collectives:
        print(f"{one.name}: {one.source}")
    table = [
        line
        for one in collectives
        for line in predict(compute, one, hidden=hidden, layers=layers, accept=accept)
    ]
    print_table(title, table, accept)
    print(
        "kind: compute/all-reduce/draft; seen on that machine before: 60 tok/s with"
        " EAGLE-3 at accept length 2.0 in SGLang, 82 without; published for vLLM: 122 to 125."
    )
    return 0


if __name__ == "__main__":
    cli.run(main)
