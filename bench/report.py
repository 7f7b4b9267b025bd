"""Result files to the tables and pictures of the docs: `python -m bench.report`.

Tables go between `<!-- bench:NAME -->` and `<!-- bench:end -->` of a Markdown file, so that a
stale number cannot survive a new result. Without `--write` the tables are printed. A drawn or
printed number always names the file that it is from.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from typing import Any

from bench import cli, harness, mla_report, plots
from bench.layer_parts import PART_NAMES
from fastverify.errors import ConfigError

END = "<!-- bench:end -->"
STEPS = "verify_latency-steps"
SERVED = "mla_verify-served"
DRAWN_ROWS = (1, 3)
LAYER_KEY = re.compile(r"layer_us\.ctx(\d+)\.rows(\d+)\.(\w+)")
TOK_KEY = re.compile(r"tok_s\.ctx(\d+)\.batch(\d+)\.draft(\w+)\.accept([\d.]+)")
NAME_DATE = re.compile(r"(.+)-\d{4}-\d{2}-\d{2}$")


def newest(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Newest result of each BENCH-WHAT in folder, by that name; ConfigError without any."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        match = NAME_DATE.fullmatch(path.stem)
        body = json.loads(path.read_text())
        if match and body.get("bench") in ("verify_latency", "serve", "mla_verify"):
            found[match[1]] = {**body, "file": path.name}
    if not found:
        raise ConfigError(f"{folder} holds no result of a bench: run one first.")
    return found


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with its first column left-aligned and the others right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def source(body: dict[str, Any]) -> str:
    """One line that says where a table's numbers are from."""
    gpus = body["machine"]["gpus"]
    names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
    sglang = body["versions"].get("sglang", "?")
    return (
        f"`bench/results/{body['file']}`: {names}, SGLang {sglang}, commit {body['commit']},"
        f" `{body['command']}`"
    )


def layer_cells(body: dict[str, Any]) -> dict[int, dict[int, dict[str, float]]]:
    """context -> rows -> part -> us of a verify_latency result."""
    cells: dict[int, dict[int, dict[str, float]]] = {}
    for key, us in body["summary"].items():
        if match := LAYER_KEY.fullmatch(key):
            cells.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[match[3]] = us
    return cells


def layer_table(body: dict[str, Any]) -> str:
    """us per call of each part by row count, one table for each context, with the step."""
    out = []
    for context, by_rows in sorted(layer_cells(body).items()):
        rows = sorted(by_rows)
        lines = [
            [part, *(f"{by_rows[r][part]:.1f}" if part in by_rows[r] else "-" for r in rows)]
            for part in PART_NAMES
        ]
        steps = [body["summary"].get(f"step_ms.ctx{context}.rows{r}") for r in rows]
        lines.append(["step, ms", *("-" if ms is None else f"{ms:.2f}" for ms in steps)])
        head = [f"us per call at {context} tokens", *(f"{r} rows" for r in rows)]
        out.append(markdown(head, lines))
    return "\n\n".join([*out, source(body)])


def step_table(bodies: dict[str, dict[str, Any]]) -> str:
    """Step in ms of every verify_latency result side by side, by context and row count."""
    rows = sorted({r for body in bodies.values() for by in layer_cells(body).values() for r in by})
    lines = []
    for name, body in bodies.items():
        numbers = body["summary"]
        for context in sorted(layer_cells(body)):
            steps = [numbers.get(f"step_ms.ctx{context}.rows{r}") for r in rows]
            ratio = numbers.get(f"verify3_over_decode1.ctx{context}")
            texts = ("-" if ms is None else f"{ms:.2f}" for ms in steps)
            last = "-" if ratio is None else f"{ratio:.2f}"
            lines.append([name.removeprefix("verify_latency-"), str(context), *texts, last])
    head = ["step, ms", "context", *(f"{r} rows" for r in rows), "verify 3 / decode"]
    return markdown(head, lines)


def serve_table(body: dict[str, Any]) -> str:
    """Tokens per second by context, batch, drafts and accept length."""
    simulated = {c["simulated"] for c in body["samples"]["cells"]} - {None}
    rows = []
    for key, tok_s in body["summary"].items():
        if match := TOK_KEY.fullmatch(key):
            context, batch, drafts, accept = match.groups()
            step = body["summary"][key.replace("tok_s.", "iteration_ms.")]
            mark = " (simulated)" if drafts != "0" and float(accept) in simulated else ""
            rows.append([context, batch, drafts, accept + mark, f"{tok_s:.1f}", f"{step:.2f}"])
    head = ["context", "batch", "drafts", "accept length", "tok/s", "ms a step"]
    return markdown(head, rows) + "\n\n" + source(body)


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Table of every result by its BENCH-WHAT name, and of all steps side by side."""
    make = {"verify_latency": layer_table, "serve": serve_table}
    made = {name: make[b["bench"]](b) for name, b in results.items() if b["bench"] in make}
    kernel, served = mla_results(results)
    for name, body in kernel.items():
        made[name] = markdown(*mla_report.kernel_rows(body)) + "\n\n" + source(body)
    if served:
        sources = "\n\n".join(source(body) for body in served)
        made[SERVED] = markdown(*mla_report.served_rows(served)) + "\n\n" + sources
    if verify := {n: body for n, body in results.items() if body["bench"] == "verify_latency"}:
        made[STEPS] = step_table(verify)
    return made


def mla_results(
    results: dict[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The kernel results by name, and all served ones."""
    mla = {name: body for name, body in results.items() if body["bench"] == "mla_verify"}
    served = [body for name, body in mla.items() if name.startswith(SERVED)]
    kernel = {name: body for name, body in mla.items() if mla_report.kernel_cells(body)}
    return kernel, served


def insert(text: str, made: dict[str, str]) -> str:
    """Replace what stands between each marker pair; ConfigError for a marker without a table."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in made:
            raise ConfigError(
                f"the marker bench:{name} has no result file: the results are"
                f" {', '.join(sorted(made))}."
            )
        return f"<!-- bench:{name} -->\n{made[name]}\n{END}"

    return re.sub(r"<!-- bench:(?!end)(\S+) -->.*?<!-- bench:end -->", fill, text, flags=re.S)


def draw(results: dict[str, dict[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Stacked layer bars of each model with its backends side by side, and lines of serving."""
    paths = []
    panels: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    kernel, served = mla_results(results)
    for name, body in kernel.items():
        paths.append(mla_report.draw(body, served, folder / f"{name}.png"))
    for name, body in results.items():
        if body["bench"] == "mla_verify":
            continue
        if body["bench"] == "serve":
            paths += draw_serve(name, body["summary"], folder)
            continue
        options = body["samples"]["options"]
        model = f"{options['shape']['name']}-tp{options['tp']}"
        backend = name.removeprefix(f"verify_latency-{model}-")
        for context, by_rows in sorted(layer_cells(body).items()):
            panel = panels.setdefault(model, {}).setdefault(f"{context} tokens", {})
            for rows in DRAWN_ROWS:
                if rows in by_rows:
                    panel[f"{backend} x{rows}"] = by_rows[rows]
    for model, by_context in panels.items():
        title = f"{model}, one rank: one MoE layer with 1 row (decode) and 3 rows (verify)"
        paths.append(plots.layer_bars(by_context, title, folder / f"verify_latency-{model}.png"))
    return paths


def draw_serve(name: str, numbers: dict[str, float], folder: pathlib.Path) -> list[pathlib.Path]:
    """One picture for each context and batch that has plain decode and speculation."""
    cells: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for key, tok_s in numbers.items():
        if match := TOK_KEY.fullmatch(key):
            context, batch, drafts, accept = match.groups()
            cells.setdefault((context, batch), {}).setdefault(drafts, {})[float(accept)] = tok_s
    paths = []
    for (context, batch), by_drafts in cells.items():
        plain = by_drafts.pop("0", None)
        if plain is None or not by_drafts:
            continue
        lines = {f"{drafts} drafts": points for drafts, points in by_drafts.items()}
        title = f"{name}: context {context}, batch {batch}"
        path = folder / f"{name}-ctx{context}-batch{batch}.png"
        paths.append(plots.accept_lines(lines, next(iter(plain.values())), title, path))
    return paths


def main() -> int:
    """Print the tables, or write them into documents; optionally draw the pictures."""
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=harness.RESULTS)
    parser.add_argument("--write", type=pathlib.Path, nargs="*", default=[], help="Markdown files")
    parser.add_argument("--plots", type=pathlib.Path, help="folder for the pictures")
    args = parser.parse_args()
    results = newest(args.results)
    made = tables(results)
    for document in args.write:
        if not document.is_file():
            raise ConfigError(f"--write {document}: no such file.")
        document.write_text(insert(document.read_text(), made))
    if not args.write:
        for name, table in made.items():
            print(f"## {name}\n\n{table}\n")
    if args.plots:
        for path in draw(results, args.plots):
            print(f"drawn: {path}")
    return 0


if __name__ == "__main__":
    cli.run(main)
