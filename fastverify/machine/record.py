"""`fastverify machine`: prints this machine's facts as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fastverify.errors import ConfigError
from fastverify.machine.facts import Machine
from fastverify.machine.probe import read_machine
from fastverify.machine.store import dump_machine


def main(argv: Sequence[str] | None = None, read: Callable[[], Machine] = read_machine) -> int:
    """Print the machine as JSON on stdout and a short summary on stderr.

    Raises ConfigError when FILE cannot be written; nothing is printed then.
    """
    parser = argparse.ArgumentParser(
        prog="fastverify machine",
        description="Record this machine's facts: fastverify machine > FILE.json",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to FILE too")
    args = parser.parse_args(argv)
    machine = read()
    text = dump_machine(machine)
    _write(args.json, text)
    sys.stdout.write(text)
    print(summary(machine), file=sys.stderr)
    return 0


def summary(machine: Machine) -> str:
    """A few lines for a person: what was found and what could not be read."""
    models: dict[str, int] = {}
    for gpu in machine.gpus:
        models[gpu.name] = models.get(gpu.name, 0) + 1
    names = ", ".join(f"{count} x {name}" for name, count in models.items()) or "none"
    if machine.nvml_error is not None:
        names += f" (NVML: {machine.nvml_error})"
    cpu = f"{machine.cpu_model or 'unknown'}, sockets {machine.cpu_sockets or 'unknown'}"
    lines = [
        f"GPUs: {names}",
        f"CPU: {cpu}, virtualisation {machine.virtualisation}",
        f"driver {machine.driver_version or 'none'}, NCCL {machine.nccl_version or 'unknown'}",
    ]
    lines += [f"not read: {line}" for line in machine.unknown]
    return "\n".join(lines)


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}); name a file in a folder you may write to."
        ) from None
