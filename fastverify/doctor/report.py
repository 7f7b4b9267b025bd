"""The doctor's report: one screen, or everything, or JSON."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from fastverify.doctor.diagnose import ORDER, exit_code
from fastverify.machine.finding import Finding
from fastverify.show import COLOURS

SCREEN_LINES = 24
PIPED_WIDTH = 100
NARROWEST = 70
_WORDS = {"fail": "failure", "warn": "warning", "unknown": "unknown fact", "info": "note"}
Line = tuple[str, str]


def print_report(
    title: str,
    findings: Sequence[Finding],
    *,
    everything: bool = False,
    as_json: bool = False,
    stream: TextIO | None = None,
) -> int:
    """Print the findings, which are worst first, and return the exit code."""
    out = stream or sys.stdout
    code = exit_code(findings)
    if as_json:
        body = {"about": title, "exit_code": code, "findings": msgspec.to_builtins(findings)}
        out.write(msgspec.json.format(msgspec.json.encode(body), indent=1).decode() + "\n")
        return code
    terminal = out.isatty()
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if terminal else PIPED_WIDTH
    lines = report_lines(title, findings, max(NARROWEST, width), everything)
    if terminal:
        console = Console(file=out, highlight=False, soft_wrap=True)
        for severity, text in lines:
            console.print(Text(text, style=COLOURS.get(severity, "")))
    else:
        out.write("".join(f"{text}\n" for _, text in lines))
    return code


def report_lines(
    title: str, findings: Sequence[Finding], width: int, everything: bool
) -> list[Line]:
    """(severity, text) of each line; without `everything` at most SCREEN_LINES of them."""
    lines: list[Line] = [("", part) for part in textwrap.wrap(title, width)[:2]]
    lines += [("", summary(findings)), ("", "")]
    for position, finding in enumerate(findings):
        block = _block(finding, width, everything)
        last = position == len(findings) - 1
        if not everything and len(lines) + len(block) + (not last) > SCREEN_LINES:
            rest = summary(findings[position:])
            lines.append(("", f"{rest} more: --all"))
            break
        lines += block
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """`1 failure, 2 warnings, 3 unknown facts`."""
    counts = Counter(finding.severity for finding in findings)
    parts = [
        f"{counts[severity]} {_WORDS[severity]}{'s' * (counts[severity] > 1)}"
        for severity in ORDER
        if counts[severity]
    ]
    return ", ".join(parts) or "nothing to report"


def _block(finding: Finding, width: int, everything: bool) -> list[Line]:
    source = f" [{finding.source}]" if everything and finding.source else ""
    head = f"{finding.severity:<8}"
    text = f"{finding.code}: {finding.text}{source}"
    wrapped = textwrap.wrap(
        text, width - len(head), break_long_words=True, break_on_hyphens=False
    ) or [""]
    pad = " " * len(head)
    return [
        (finding.severity if not i else "", (pad if i else head) + part)
        for i, part in enumerate(wrapped)
    ]
