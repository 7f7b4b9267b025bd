"""The MLA tables and picture, and that the docs show what the result files hold."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from bench import harness, mla_report
from bench.report import insert, newest, tables

ROOT = pathlib.Path(__file__).parent.parent
KERNEL: dict[str, Any] = {
    "summary": {
        "copy.gb_per_s": 4000.0,
        "us.ctx512.rows4.fastverify": 9.36,
        "us.ctx512.rows4.limit": 0.2,
        "us.ctx512.rows4.triton": 84.7,
        "us.ctx4096.rows4.batch16.flashinfer_fa3": 36.77,
    }
}


def test_cells_keep_contenders_only() -> None:
    assert mla_report.kernel_cells(KERNEL) == {
        (4, 1, 512): {"fastverify": 9.36, "triton": 84.7},
        (4, 16, 4096): {"flashinfer_fa3": 36.77},
    }


def test_rows_leave_unmeasured_cells_open() -> None:
    head, rows = mla_report.kernel_rows(KERNEL)
    assert len(head) == 6
    assert rows[0] == ["4 rows, batch 1", "512", "9.4", "-", "-", "84.7"]
    assert rows[1] == ["4 rows, batch 16", "4096", "-", "36.8", "-", "-"]


def test_served_rows_join_results() -> None:
    ours = {
        "summary": {"iteration_ms.ctx512.fastverify": 3.9, "iteration_ms.ctx4096.fastverify": 4.3}
    }
    theirs = {"summary": {"iteration_ms.ctx4096.nospec-triton": 2.4}}
    head, rows = mla_report.served_rows([ours, theirs])
    assert head == ["ms per iteration", "512", "4096"]
    assert rows == [["fastverify", "3.9", "4.3"], ["nospec-triton", "-", "2.4"]]


def test_the_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    served = [{"summary": {"iteration_ms.ctx512.fastverify": 3.9}}]
    full = {"summary": {f"us.ctx{c}.rows4.{n}": 1.0 * c for c in (8, 9) for n in mla_report.LABELS}}
    drawn = mla_report.draw(full, served, tmp_path / "a.png")
    assert drawn.stat().st_size > 5000


def test_the_docs_hold_the_numbers_of_the_newest_results() -> None:
    document = (ROOT / "docs" / "eagle-fast-verify.md").read_text()
    assert insert(document, tables(newest(harness.RESULTS))) == document


def test_every_result_says_where_it_is_from() -> None:
    import json

    for path in harness.RESULTS.glob("*.json"):
        body = json.loads(path.read_text())
        assert {"bench", "command", "commit", "machine", "versions", "samples", "summary"} <= set(
            body
        )
        assert re.match(r"[0-9a-f]{7,12}(\+dirty)?$", body["commit"]), path
        assert body["machine"]["gpus"], path
