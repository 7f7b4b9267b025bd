"""Result files to tables and pictures; the numbers here are made up and stay in a temp folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from bench import report
from fastverify.errors import ConfigError

NAME = "verify_latency-kimi-k2.5-tp8-triton"


def latency(date: str, attention_us: float) -> dict[str, Any]:
    parts = {"input_norm": 3.0, "attention": attention_us, "moe_overlap": -4.0}
    numbers = {
        f"layer_us.ctx{context}.rows{rows}.{part}": us
        for context in (512, 4096)
        for rows in (1, 3)
        for part, us in parts.items()
    }
    numbers |= {"step_ms.ctx512.rows1": 5.0, "step_ms.ctx512.rows3": 7.5}
    numbers["verify3_over_decode1.ctx512"] = 1.5
    return {
        "bench": "verify_latency", "command": f"python -m bench.verify_latency {date}",
        "commit": "abc", "machine": {"gpus": [{"name": "Some GPU"}]}, "versions": {"sglang": "1"},
        "summary": numbers, "samples": {"options": {"tp": 8, "shape": {"name": "kimi-k2.5"}}},
    }  # fmt: skip


def served() -> dict[str, Any]:
    numbers = {}
    for drafts, accept, tok_s in ((0, 1, 100.0), (2, 1.5, 90.0), (2, 2, 120.0)):
        where = f"ctx512.batch1.draft{drafts}.accept{accept:g}"
        numbers |= {f"tok_s.{where}": tok_s, f"iteration_ms.{where}": 12.0}
    cells = [{"simulated": None}, {"simulated": 1.5}, {"simulated": 2.0}]
    return latency("x", 1.0) | {"bench": "serve", "summary": numbers, "samples": {"cells": cells}}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for date, us in (("2026-01-01", 80.0), ("2026-02-01", 14.0)):
        (tmp_path / f"{NAME}-{date}.json").write_text(json.dumps(latency(date, us)))
    (tmp_path / "serve-kimi-k2.5-tp8-2026-02-01.json").write_text(json.dumps(served()))
    (tmp_path / "other-2026-02-01.json").write_text(json.dumps({"bench": "other"}))
    return tmp_path


def test_the_newest_result_of_a_name_wins(folder: pathlib.Path) -> None:
    results = report.newest(folder)
    assert set(results) == {NAME, "serve-kimi-k2.5-tp8"}
    assert results[NAME]["file"].endswith("2026-02-01.json")


def test_tables_hold_the_numbers_and_name_their_file(folder: pathlib.Path) -> None:
    made = report.tables(report.newest(folder))
    assert "| attention | 14.0 | 14.0 |" in made[NAME]
    assert "| step, ms | 5.00 | 7.50 |" in made[NAME]
    assert "| step, ms | - | - |" in made[NAME]
    assert "Some GPU" in made[NAME]
    assert f"{NAME}-2026-02-01.json" in made[NAME]
    assert "| kimi-k2.5-tp8-triton | 512 | 5.00 | 7.50 | 1.50 |" in made[report.STEPS]
    text = made["serve-kimi-k2.5-tp8"]
    assert "| 512 | 1 | 2 | 2 (simulated) | 120.0 | 12.00 |" in text
    assert "| 512 | 1 | 0 | 1 | 100.0 | 12.00 |" in text


def test_markers_are_filled_and_refilled(folder: pathlib.Path) -> None:
    made = {"a": "table A", "b": "table B"}
    text = f"x\n<!-- bench:a -->\nold\n{report.END}\ny\n<!-- bench:b -->{report.END}\nz\n"
    once = report.insert(text, made)
    assert "table A" in once
    assert "table B" in once
    assert "old" not in once
    assert report.insert(once, made) == once
    with pytest.raises(ConfigError, match="bench:c has no result file"):
        report.insert(f"<!-- bench:c -->{report.END}", made)


def test_pictures_are_drawn(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    paths = report.draw(report.newest(folder), tmp_path / "plots")
    assert {path.name for path in paths} == {
        "verify_latency-kimi-k2.5-tp8.png",
        "serve-kimi-k2.5-tp8-ctx512-batch1.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_an_empty_folder(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="run one first"):
        report.newest(tmp_path)
