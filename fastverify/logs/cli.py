"""`fastverify logs FILE...`: reads what servers and tools wrote and explains it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from fastverify.doctor.collect import KINDS, collect
from fastverify.doctor.diagnose import diagnose
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.report import print_report
from fastverify.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].lower()}{message[1:]}: see `{self.prog} --help`.")


def logs_main(argv: Sequence[str]) -> int:
    """Print what the files show; returns 0 (nothing wrong), 1 (warnings) or 2 (failures).

    Raises ConfigError for a file that cannot be read or is of no known kind.
    """
    parser = _Parser(
        prog="fastverify logs",
        description=f"Explain recorded files, each of them {KINDS}.",
        epilog="files given together are taken to be of one run; two /metrics pages are compared",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--all", action="store_true", help="show everything, with sources")
    options = parser.parse_args(list(argv))
    evidence = collect(options.files)
    title = f"fastverify logs: {_about(evidence)}"
    return print_report(title, diagnose(evidence), everything=options.all, as_json=options.json)


def _about(evidence: Evidence) -> str:
    """What was recognised, so that a file taken for another kind is noticed."""
    parts = []
    for log in evidence.servers:
        parts.append(f"{log.engine or 'server'} log, {len(log.decodes)} decode lines")
    if evidence.nccl is not None:
        parts.append(f"NCCL {evidence.nccl.version or 'output'}")
    parts += [f"{dump.engine} metrics" for dump in evidence.dumps]
    if evidence.machine is not None:
        parts.append(f"facts of {len(evidence.machine.gpus)} GPUs")
    if evidence.kernel is not None:
        parts.append("kernel log")
    if evidence.bridges is not None:
        parts.append(f"{len(evidence.bridges)} PCIe bridges")
    if evidence.environ is not None:
        parts.append("environment")
    if evidence.graph_text is not None:
        parts.append("NCCL graph")
    return "; ".join(parts) or "measurements"
