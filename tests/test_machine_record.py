from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fastverify.machine import load_machine
from fastverify.machine.record import main, summary
from tests.machines import NAMES, machine
from tests.sentences import check_refused


@pytest.mark.parametrize("name", NAMES)
def test_stdout_is_the_machine_and_stderr_is_for_people(name: str, capsys, tmp_path) -> None:
    assert main(["--json", str(tmp_path / "m.json")], lambda: machine(name)) == 0
    out, err = capsys.readouterr()
    saved = tmp_path / "redirected.json"
    saved.write_text(out)
    assert load_machine(saved) == load_machine(tmp_path / "m.json") == machine(name)
    assert err.startswith("GPUs: ")


def test_the_summary_counts_models_and_says_what_was_not_read() -> None:
    assert "8 x NVIDIA RTX PRO 6000" in summary(machine("two-sockets"))
    none = summary(machine("none"))
    assert "none (NVML: NVML Shared Library Not Found)" in none
    assert "not read: gpus: nvidia-smi -L" in none


def test_a_file_that_cannot_be_written_is_one_sentence(capsys, tmp_path) -> None:
    target = ["--json", str(tmp_path / "no" / "m.json")]
    check_refused(main, target, lambda: machine("none"), says=("cannot write", "m.json"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("locale", ["C", "tr_TR.UTF-8", "de_DE.UTF-8"])
def test_the_command_prints_json_in_any_locale(locale: str) -> None:
    code = "import sys; from fastverify.machine.record import main; sys.exit(main([]))"
    env = {**os.environ, "LC_ALL": locale, "LANG": locale}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
