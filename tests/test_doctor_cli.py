"""The command `fastverify doctor`, with models, drafters and recorded files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from fastverify.cli import main
from fastverify.doctor.cli import doctor_main
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.live import read_live
from fastverify.doctor.setup import missing_layers
from fastverify.model.files import resolve
from tests.checkpoints import (
    ABSENT,
    HALF,
    TARGET,
    draft_config,
    draft_tensors,
    write_model,
)
from tests.machines import FOLDER, machine
from tests.sentences import check_refused

REPORTS = Path(__file__).parent / "data" / "reports"


def recorded(name: str) -> str:
    return str(FOLDER / f"{name}.json")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, str]]:
    """Exit code, and severity by code."""
    code = doctor_main([*argv, "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["exit_code"] == code
    return code, {finding["code"]: finding["severity"] for finding in body["findings"]}


def test_plain_text_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_main(["--machine", recorded("vm")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("fastverify doctor: 4 x NVIDIA RTX PRO 6000")
    assert "\x1b" not in out and len(out.splitlines()) <= 24
    assert doctor_main(["--machine", recorded("vm"), "--all"]) == 1
    assert "[facts" in capsys.readouterr().out


def test_recorded_files_are_judged_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, "--machine", recorded("two-switches"), str(REPORTS / "R86.json"))
    assert code == 2 and found["write-collapse"] == "fail"
    four = str(REPORTS / "R37-topo.txt")
    check_refused(
        doctor_main,
        ["--machine", recorded("vm"), four, str(REPORTS / "R25-topo.txt")],
        says=("different machines",),
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--machine", "absent.json"], "absent.json"),
        (["--accept-length", "many"], "many"),
        (["--accept-length", "0"], "above 0"),
        (["--tp", "0"], "from 1 up"),
        (["--nonsense"], "nonsense"),
        (["--machine", recorded("vm"), "--probe"], "--probe"),
        (["--machine", recorded("vm"), "--draft", "x/y"], "--model"),
        (["--machine", recorded("vm"), "absent.log"], "absent.log"),
    ],
)
def test_bad_arguments_are_one_sentence(argv: list[str], says: str) -> None:
    check_refused(doctor_main, argv, says=(says,))


@pytest.mark.parametrize(
    ("length", "code"),
    [("2.0", "speculation-loses"), ("2.73", "speculation-neutral"), ("3,4", "speculation-pays")],
)
def test_break_even_from_given_times(
    length: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = ("--step-ms", "12.2", "--iteration-ms", "33.3")
    _, found = run(capsys, "--machine", recorded("h200"), "--accept-length", length, *times)
    assert code in found
    _, found = run(capsys, "--machine", recorded("h200"), "--accept-length", length)
    assert found["pays-unknown"] == "unknown"


def test_a_model_brings_its_launch_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run(capsys, "--machine", recorded("two-sockets"), "--model", "kimi-k2.5")
    assert "model-unfit" not in found
    assert "nccl-would-set" not in found  # the plan says it, argument by argument
    code, found = run(capsys, "--machine", recorded("laptop"), "--model", "kimi-k2.5")
    assert code == 2 and found["model-unfit"] == "fail"
    code, found = run(capsys, "--machine", recorded("laptop"), "--model", "kimi-k9")
    assert code == 2 and found["model-unfit"] == "fail"


ZERO = [0] * 24
TWICE = [0, 0, *([1] * 22)]
FAR = [200] * 24
BAD_DRAFTERS = {
    "missing map": ({}, {"d2t": ABSENT, "t2d": ABSENT}),
    "zero map": ({}, {"d2t": ZERO, "t2d": ABSENT}),
    "repeated targets": ({}, {"d2t": TWICE + [-1] * 0, "t2d": ABSENT}),
    "ids out of range": ({}, {"d2t": FAR, "t2d": ABSENT}),
    "layers of another target": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
        {},
    ),
    "another hidden size": ({"hidden_size": 64}, {}),
}


@pytest.mark.parametrize("name", [*BAD_DRAFTERS, "good"])
def test_drafters(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    config, tensors = BAD_DRAFTERS.get(name, ({}, {}))
    arrays = {k: v if v is ABSENT else np.asarray(v) for k, v in tensors.items()}
    if name == "repeated targets":
        arrays["d2t"] = -np.arange(24)
    weights = {"model.embed_tokens.weight": np.zeros((96, 32), HALF)}
    target = write_model(tmp_path / "target", TARGET, weights)
    draft = write_model(
        tmp_path / "d", draft_config("mha", **config), draft_tensors("mha", **arrays)
    )
    argv = ("--machine", recorded("h200"), "--model", target, "--draft", draft)
    code, found = run(capsys, *argv)
    assert ("model-unfit" in found) == (name != "good")
    assert (code == 2) == (name != "good")


def test_a_drafter_of_another_version_is_only_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    weights = {"model.embed_tokens.weight": np.zeros((96, 32), HALF)}
    target = write_model(tmp_path / "M2.7-NVFP4", TARGET, weights)
    draft = write_model(tmp_path / "M2.5-Eagle3", draft_config("mha"), draft_tensors("mha"))
    argv = ("--machine", recorded("h200"), "--model", target, "--draft", draft)
    code, found = run(capsys, *argv)
    assert (code, found["drafter"]) == (1, "warn")


@pytest.mark.parametrize("stated", [0, 1, 2])
@pytest.mark.parametrize("held", [0, 1, 2])
def test_prediction_layers_that_are_stated_and_absent(
    stated: int, held: int, tmp_path: Path
) -> None:
    config = {**TARGET, "num_nextn_predict_layers": stated}
    folder = Path(write_model(tmp_path / "m", config))
    names = [f"model.layers.{n}.mlp.gate.weight" for n in range(8 + held)]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = missing_layers(resolve(str(folder)))
    assert (problem is None) == (held >= stated)
    if problem is not None:
        assert f"layer {8 + held}," in problem


def test_this_machine_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it is: no trace, and what cannot be read is said with its command."""
    assert doctor_main([]) in (0, 1, 2)
    assert capsys.readouterr().out.startswith("fastverify doctor: ")


def test_live_evidence_of_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu 1 2\nbtime 4000000000\n")
    cache = tmp_path / "home/.cache/sglang"
    cache.mkdir(parents=True)
    (cache / "gpu_p2p_access_cache_for_0,1.json").write_text("{}")
    graph = tmp_path / "graph.xml"
    graph.write_bytes(b"\0\0")
    environ = {"HOME": str(tmp_path / "home"), "NCCL_GRAPH_FILE": str(graph)}
    evidence = read_live(environ, tmp_path)
    notes = {note.code: note for note in evidence.notes}
    assert "~/.cache/sglang/gpu_p2p_access_cache_for_0,1.json" in notes["cache-stale"].text
    assert str(tmp_path) not in notes["cache-stale"].text
    assert notes["graph-file-xml"].severity == "fail"


def test_the_probe_runs_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastverify.comm import peer_children
    from fastverify.comm.probe import Proof
    from fastverify.doctor import probing

    def read(environ: Mapping[str, str]) -> Evidence:
        return Evidence(machine=machine("two-h200"), complete=True, environ=dict(environ))

    failure = "GPU 0 wrote 4096 bytes to GPU 1, which sees 9 of them wrong"
    monkeypatch.setattr(peer_children, "proved", lambda devices, key: Proof(key, 2, (failure,)))
    assert doctor_main(["--probe", "--json"], read, {}) == 2
    assert "peers-wrong-data" in capsys.readouterr().out
    monkeypatch.setattr(peer_children, "proved", lambda devices, key: Proof(key, 2))
    speeds = (((0.0, 50.0), (51.0, 0.0)), ((0.0, 6.0), (7.0, 0.0)))
    monkeypatch.setattr(probing, "measure", lambda devices: None)
    assert doctor_main(["--probe", "--json"], read, {}) == 0
    assert "pair-speed-unread" in capsys.readouterr().out
    monkeypatch.setattr(probing, "measure", lambda devices: speeds)
    assert doctor_main(["--probe", "--json"], read, {}) == 0
    out = capsys.readouterr().out
    assert "peers-proved" in out and "6.0 to 7.0 us" in out and "50.0 to 51.0 GB/s" in out
    assert doctor_main(["--json"], read, {}) == 0
    assert "peers-proved" not in capsys.readouterr().out


@pytest.mark.skipif(
    "doctor" not in main.__globals__["COMMANDS"], reason="not wired into the script"
)
def test_the_console_script_knows_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--machine", recorded("h200")]) == 0
    assert main(["logs", str(REPORTS / "absent")]) == 2
