"""The launcher at the terminal: exit codes, one sentence, nothing half-started."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fastverify import launch, reports
from fastverify.errors import ConfigError


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line of stderr."""
    code = launch.main(list(argv))
    lines = capsys.readouterr().err.strip().splitlines()
    return code, lines[-1] if lines else ""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--model"),
        (["--model", "nope"], "the presets are deepseek-v3"),
        (["--model", "kimi-k2.6 "], "did you mean 'kimi-k2.6'?"),
        (["--model", "/does/not/exist"], "'/does/not/exist'"),
        (["--model", "tiny", "--draft", "/nope"], "'/nope'"),
        (["--model", "tiny", "--tp", "3"], "16 attention heads"),
        (["--model", "tiny", "--port", "99999"], "99999"),
        (["--model", "tiny", "--plan", "--machine", "gone.json"], "gone.json"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = run(*argv, capsys=capsys)
    assert code == 2
    assert line.startswith("fastverify: ") and says in line


def test_a_port_in_use_names_a_free_one(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = run("--model", "tiny", "--port", str(taken_port), capsys=capsys)
    assert code == 2 and f"--port {taken_port} is already in use" in line


def test_a_switch_that_is_not_understood_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTVERIFY_DISABLE", "yes")
    code, line = run("--model", "tiny", "--plan", capsys=capsys)
    assert code == 2 and "'yes'" in line


def test_debug_shows_the_stack() -> None:
    with pytest.raises(ConfigError):
        launch.main(["--model", "nope", "--debug"])


def test_a_plan_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys\n"
        "from fastverify import launch\n"
        "code = launch.main(['--model', 'tiny', '--plan'])\n"
        "heavy = {'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code or len(heavy))"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_plan_piped_as_json_is_json() -> None:
    import json

    command = (sys.executable, "-m", "fastverify.launch", "--model", "tiny", "--plan=json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    plan = json.loads(done.stdout)
    assert {line["name"] for line in plan["arguments"]} >= {"model-path", "tp-size"}
    assert all(line["reason"] for line in plan["arguments"])


def test_an_unknown_sglang_flag_names_the_closest() -> None:
    from fastverify.hooks.server import check_arguments

    with pytest.raises(ConfigError, match=r"did you mean --log-level\?"):
        check_arguments(["--model-path", "x", "--log-levle", "info"])
    with pytest.raises(ConfigError, match="invalid int value: 'two'"):
        check_arguments(["--model-path", "x", "--tp-size", "two"])


def test_the_run_folder_is_made_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTVERIFY_RUN_DIR", raising=False)
    with launch.RunFolder() as folder:
        reports.write(folder, "failure-1.json", reports.Failure("no."))
        assert reports.failures(folder) == ("no.",)
    assert not folder.exists()


def test_a_named_run_folder_is_kept_and_cleared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("FASTVERIFY_RUN_DIR", str(tmp_path / "run"))
    with launch.RunFolder() as folder:
        reports.write(folder, "failure-1.json", reports.Failure("old."))
    with launch.RunFolder() as folder:
        assert reports.failures(folder) == ()
    assert folder.exists()


def test_an_unwritable_run_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTVERIFY_RUN_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="FASTVERIFY_RUN_DIR"), launch.RunFolder():
        pass


def test_the_address_defaults_to_that_of_sglang() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    from fastverify.request import parse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    theirs = (parser.get_default("host"), parser.get_default("port"))
    assert launch.address(parse(["--model", "tiny"])) == theirs
