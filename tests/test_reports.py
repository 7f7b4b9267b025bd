"""Every user report yields the finding it should, from its own small fixture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastverify.doctor.collect import collect
from fastverify.doctor.diagnose import diagnose, exit_code
from fastverify.doctor.report import SCREEN_LINES, report_lines
from fastverify.machine.finding import Finding
from tests.report_table import EXPECTED, FROM_CHECKPOINTS, OUT_OF_SCOPE

FOLDER = Path(__file__).parent / "data" / "reports"
NAMES = """01 02 03 04 05 06 07 08 09 10 11 12 13 15 16 18 19 20 21 22 23 24 25 27 28 29 30 31 32
33 34 36 37 39 40 41 42 43 44 46 47 48 50 51 52 53 55 56 57 58 59 60 61 62 63 64 65 67
68 69 70 71 72 74 75 76 77 78 79 80 81 82 83 85 86 87 89 90 91 93 94 95 97 98 99 100 102
103 104 106 108 109 111 112 113 115 116 118 119 121"""
REPORTS = tuple(f"R{number}" for number in NAMES.split())


def files(report: str) -> list[Path]:
    return sorted(p for p in FOLDER.iterdir() if re.fullmatch(rf"{report}[.-].+", p.name))


def findings(report: str) -> tuple[Finding, ...]:
    return diagnose(collect(files(report)))


def test_every_report_is_answered() -> None:
    assert set(REPORTS) == set(EXPECTED) | set(FROM_CHECKPOINTS) | set(OUT_OF_SCOPE)
    assert not set(EXPECTED) & set(OUT_OF_SCOPE)
    assert {re.match(r"R\d+", p.name).group() for p in FOLDER.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("report", EXPECTED)
def test_report_yields_its_findings(report: str) -> None:
    codes = {finding.code for finding in findings(report)}
    assert set(EXPECTED[report]) <= codes


@pytest.mark.parametrize("report", EXPECTED)
def test_findings_are_sentences_and_fit_a_screen(report: str) -> None:
    found = findings(report)
    for finding in found:
        assert finding.text == " ".join(finding.text.split()), finding.text
        assert finding.text.endswith((".", "?")), finding.text
        assert not re.search(r"[.!?]\s", finding.text), finding.text
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", finding.code)
    assert len(report_lines("title", found, 100, False)) <= SCREEN_LINES


@pytest.mark.parametrize("report", EXPECTED)
def test_what_is_reported_cites_the_report(report: str) -> None:
    sources = " ".join(f.source for f in findings(report) if f.code in EXPECTED[report])
    assert re.search(rf"\b{report}\b", sources) or report in ("R02", "R29", "R75"), sources


def test_no_report_raises_an_alarm_about_another() -> None:
    """A fixture holds few facts: what is not in it must not be judged."""
    for report in EXPECTED:
        loud = {f.code for f in findings(report) if f.severity in ("fail", "warn")}
        assert len(loud) <= 5, (report, loud)


def test_exit_code_follows_the_worst() -> None:
    assert exit_code(findings("R25")) == 2
    assert exit_code(findings("R94")) == 1
    assert exit_code(findings("R56")) == 0
