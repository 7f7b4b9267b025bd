"""Plans: golden files for every recorded machine, the user's flags, and refusals."""

from __future__ import annotations

import os
import pathlib
import shlex
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify import show
from fastverify.errors import ConfigError
from fastverify.inputs import Inputs, gather
from fastverify.machine.facts import Machine
from fastverify.plan import LaunchPlan, Line, merge
from fastverify.planner import plan as make_plan
from fastverify.preset import load_preset, preset_config, preset_names
from fastverify.request import parse
from tests import machines
from tests.sentences import check_refused

GOLDEN = pathlib.Path(__file__).parent / "golden"
LARGE = ("kimi-k2.5", "kimi-k2.6", "deepseek-v3", "glm-5")


@pytest.fixture(autouse=True)
def empty_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans must not depend on what this machine has downloaded."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)


def planned(machine: Machine, *argv: str, env: dict[str, str] | None = None) -> LaunchPlan:
    """The plan for a machine and a command line."""
    request = parse([*argv, "--plan"])
    preset = load_preset(request.model)
    inputs = Inputs(machine, preset, preset_config(preset), request)
    return make_plan(inputs, env or {})


def kimi(*argv: str, machine: str = "two-switches", **kwargs: Any) -> LaunchPlan:
    """Kimi-K2.5 on a recorded machine."""
    return planned(machines.machine(machine), "--model", "kimi-k2.5", *argv, **kwargs)


@pytest.mark.parametrize("name", machines.NAMES)
def test_the_plan_for_kimi_is_the_reviewed_one(name: str) -> None:
    path = pathlib.Path(__file__).parent / "data" / "machines" / f"{name}.json"
    request = parse(["--model", "kimi-k2.5", "--plan", "--machine", str(path)])
    try:
        text = show.plan_text(make_plan(gather(request, {}), {}))
    except ConfigError as error:
        text = f"refused: {error}\n"
    golden = GOLDEN / f"kimi-k2.5-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("preset", preset_names())
def test_every_argument_has_a_reason_and_sglang_takes_it(preset: str) -> None:
    from fastverify.hooks.server import check_arguments

    if preset == "tiny":
        request = parse(["--model", "tiny", "--plan"])
        plan = make_plan(gather(request, {}), {})
    else:
        plan = planned(machines.machine("two-sockets"), "--model", preset)
    assert all(line.reason for line in (*plan.arguments, *plan.environment))
    check_arguments(plan.argv())


def test_user_flags_win_and_say_what_they_replace() -> None:
    plan = kimi("--speculative-num-steps", "3", "--trust-remote-code", "--log-level", "debug")
    steps = next(a for a in plan.arguments if a.name == "speculative-num-steps")
    assert (steps.value, steps.source) == ("3", "user")
    assert steps.reason.startswith("yours; the plan had 2: ")
    assert plan.value("speculative-num-draft-tokens") == "4"
    assert plan.draft_lengths == (3,)
    assert {s.rows for s in plan.graphs.shapes if s.phase == "verify"} == {4}
    assert plan.argv().count("--speculative-num-steps") == 1
    assert plan.argv()[-2:] == ["--log-level", "debug"]


def test_user_variables_win() -> None:
    plan = kimi(env={"NCCL_P2P_LEVEL": "PIX"})
    level = next(v for v in plan.environment if v.name == "NCCL_P2P_LEVEL")
    assert (level.value, level.source) == ("PIX", "user")
    assert "NCCL_P2P_LEVEL" not in plan.variables()


def test_speculation_off_captures_decode_only() -> None:
    plan = kimi("--fastverify-speculation", "off")
    assert not any(a.name.startswith("speculative") for a in plan.arguments)
    assert {s.phase for s in plan.graphs.shapes} == {"decode"}


def test_the_users_own_speculation_is_left_alone() -> None:
    plan = kimi("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    assert [a.name for a in plan.arguments if a.name.startswith("speculative")] == [
        "speculative-algorithm",
        "speculative-num-draft-tokens",
    ]
    assert any(f.code == "speculation-yours" for f in plan.findings)


def test_graphs_switched_off_go_on_and_say_what_it_costs() -> None:
    plan = kimi("--disable-decode-cuda-graph")
    assert plan.graphs.shapes == ()
    assert any(f.code == "graphs-off" and "30 ms" in f.text for f in plan.findings)


def test_the_verify_kernel_is_chosen_where_its_table_reaches() -> None:
    assert kimi().variables()["FASTVERIFY_ATTENTION"] == "verify"
    assert "FASTVERIFY_ATTENTION" not in kimi("--fastverify-attention", "triton").variables()
    assert "FASTVERIFY_ATTENTION" not in kimi("--attention-backend", "flashinfer").variables()
    assert kimi("--fastverify-attention", "flashinfer").value("attention-backend") == "flashinfer"


@pytest.mark.parametrize(
    ("argv", "machine", "says"),
    [
        ((), "none", ("needs 8 GPUs", "shows none", "--model tiny")),
        ((), "one-switch", ("8 GPUs", "shows 4", "--tp-size to 4")),
        (("--tp", "3"), "two-switches", ("3", "64")),
        (("--tp", "2"), "two-switches", ("GB of weights", "102.6 GB")),
        (("--tp", "zero"), "two-switches", ("--tp-size", "'zero'")),
        (("--max-running-requests", "0"), "two-switches", ("max-running-requests", "'0'")),
        (("--cuda-graph-bs-decode", "1", "x"), "two-switches", ("'1 x'",)),
        (("--attention-backend", "fa3"), "two-switches", ("fa3", "12.x", "triton")),
        (
            ("--flashinfer-allreduce-fusion-backend", "trtllm"),
            "two-switches",
            ("trtllm", "12.x", "leave the flag out"),
        ),
    ],
)
def test_what_cannot_run_is_refused(
    argv: tuple[str, ...], machine: str, says: tuple[str, ...]
) -> None:
    check_refused(kimi, *argv, machine=machine, says=says)


@pytest.mark.parametrize("name", ["kimi-k25", "Kimi-K2.5", "tinny", "glm5"])
def test_an_unknown_preset_names_the_closest(name: str) -> None:
    near = {"tinny": "tiny", "glm5": "glm-5"}.get(name, "kimi-k2.5")
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        gather(parse(["--model", name, "--plan"]), {})


def test_a_hub_name_without_files_or_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="hf download someone/else config.json"):
        gather(parse(["--model", "someone/else", "--plan"]), {})


def test_a_hub_name_of_a_preset_uses_it() -> None:
    inputs = gather(parse(["--model", "moonshotai/Kimi-K2.5", "--plan"]), {})
    assert inputs.preset.name == "kimi-k2.5"


@settings(max_examples=60, deadline=None)
@given(machine=machines.machines(), name=st.sampled_from(LARGE), tp=st.sampled_from([1, 2, 4, 8]))
def test_a_plan_is_pure_and_total(machine: Machine, name: str, tp: int) -> None:
    def once() -> Any:
        try:
            return planned(machine, "--model", name, "--tp", str(tp))
        except ConfigError as error:
            return str(error)

    first = once()
    assert first == once()
    if isinstance(first, LaunchPlan):
        running = int(first.value("max-running-requests") or 0)
        for batch in range(1, running + 1):
            assert first.graphs.serving("verify", batch, first.draft_lengths[0] + 1)
        assert msgspec.json.decode(msgspec.json.encode(first), type=LaunchPlan) == first


WORDS = st.text("ab {}\"'\\:,", min_size=1, max_size=8).filter(lambda s: not s.startswith("--"))


@given(st.lists(WORDS, max_size=3))
def test_values_reach_sglang_as_they_were_given(values: list[str]) -> None:
    line = Line("json-model-override-args", shlex.join(values), "given", "user")
    plan = kimi()
    merged = msgspec.structs.replace(plan, arguments=merge((), (line,)))
    assert merged.argv() == ["--json-model-override-args", *values]
