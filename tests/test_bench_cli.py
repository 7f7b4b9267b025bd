"""Command lines of the benches: lists, refusals, exit codes, and the smoke test on the CPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from bench import cli, harness, layer_print, prebuild_marlin, verify_latency
from fastverify.errors import ConfigError

ROOT = pathlib.Path(__file__).parent.parent


def test_lists() -> None:
    assert cli.int_list("1,2,8", "--rows", 1, 8) == (1, 2, 8)
    assert cli.float_list("1.5,2", "--accept", 1, 4) == (1.5, 2.0)
    assert cli.name_list("a, b", "--x", ("a", "b", "c")) == ("a", "b")
    for bad in ("", "1,,2", "9", "x", "1.5"):
        with pytest.raises(ConfigError, match="whole numbers from 1 to 8"):
            cli.int_list(bad, "--rows", 1, 8)
    with pytest.raises(ConfigError, match="'d' is unknown: it takes a, b"):
        cli.name_list("a,d", "--x", ("a", "b"))


@pytest.mark.parametrize(("error", "code"), [(ConfigError("bad"), 2), (KeyboardInterrupt(), 130)])
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    with pytest.raises(SystemExit) as stop:
        cli.run(fail)
    assert stop.value.code == code
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_progress_yields_everything_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(cli.progress([1, 2], lambda n: f"item {n}", 2)) == [1, 2]
    err = capsys.readouterr().err
    assert "[1/2" in err
    assert "item 2" in err


def test_replays_fit_the_budget_but_stay_at_least_five() -> None:
    assert harness.replays_within(1000.0, 0.15, 50) == 50
    assert harness.replays_within(10000.0, 0.15, 50) == 15
    assert harness.replays_within(300000.0, 0.15, 50) == 5


def test_deciding_rows_come_first_for_every_context_and_backend() -> None:
    options = verify_latency.parse(["--model", "tiny", "--rows", "1,2,3", "--contexts", "64,256"])
    cells = verify_latency.plan(options)
    assert [(c.context, c.rows) for c in cells[: len(cells) * 2 // 3]] == [
        (64, 1), (64, 3), (256, 1), (256, 3),
    ]  # fmt: skip
    assert {c.rows for c in cells[len(cells) * 2 // 3 :]} == {2}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rows", "0"], "--rows '0'"),
        (["--contexts", "5000"], "pass a shorter --contexts"),
        (["--tp", "3"], "--tp 3 does not divide tiny"),
        (["--batch", "0"], "--batch 0"),
        (["--moe", "cutlass"], "'cutlass' is unknown: it takes marlin, triton"),
        (["--model", "nothing"], "unknown model 'nothing'"),
        (["--seconds", "0"], "--seconds 0"),
    ],
)
def test_bad_input_of_verify_latency_is_one_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        verify_latency.parse(argv)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_failures_are_told_once_with_their_count() -> None:
    options = verify_latency.parse(["--model", "tiny", "--rows", "1,3", "--contexts", "64"])
    cells = verify_latency.plan(options)
    for cell in cells:
        cell.failed["attention"] = "no memory"
    lines = list(layer_print.failures(cells))
    assert len(lines) == 1
    assert f"({len(cells)} cells" in lines[0]


def test_marlin_arch() -> None:
    assert prebuild_marlin.parse_arch("12.0") == (12, 0)
    assert prebuild_marlin.parse_arch(None) is None
    with pytest.raises(ConfigError, match="--arch '9'"):
        prebuild_marlin.parse_arch("9")


@pytest.mark.engine
def test_smoke_on_the_cpu_checks_parts_against_the_model_and_writes_nothing() -> None:
    before = set(harness.RESULTS.glob("*.json"))
    done = subprocess.run(
        [sys.executable, "-m", "bench.verify_latency", "--model", "tiny"],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert verify_latency.SMOKE_NOTE in done.stdout
    assert "unattributed" in done.stdout, done.stdout
    assert "failed" not in done.stdout
    assert set(harness.RESULTS.glob("*.json")) == before
