"""What must be captured, and when a step goes eager: our rules against SGLang's own."""

from __future__ import annotations

import os
import pathlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify import reports
from fastverify.errors import ConfigError
from fastverify.graphs import (
    Exclusion,
    Runner,
    Shape,
    Step,
    batch_sizes,
    capture_plan,
    check_lengths,
    why_eager,
)
from fastverify.inputs import gather
from fastverify.plan import LaunchPlan
from fastverify.planner import plan as make_plan
from fastverify.request import parse
from tests.engine import Server, drafter_flags

SMALL = ("--max-total-tokens", "32768", "--mem-fraction-static", "0.2")
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True).map(tuple)


def test_three_drafts_capture_verify_draft_and_extend() -> None:
    plan = capture_plan((3,), (1, 2), drafter="mha", draft_backend="triton")
    assert plan.shapes == (
        Shape("draft", 1, 1),
        Shape("draft", 2, 1),
        Shape("draft_extend", 1, 4),
        Shape("draft_extend", 2, 4),
        Shape("verify", 1, 4),
        Shape("verify", 2, 4),
    )
    assert plan.exclusions == ()


def test_short_lengths_draft_nothing_and_say_why() -> None:
    plan = capture_plan((0, 1), (1,), drafter="mla", draft_backend="triton")
    assert {shape.phase for shape in plan.shapes} == {"verify", "draft_extend"}
    assert plan.exclusions == (
        Exclusion("draft", 0, "nothing is drafted"),
        Exclusion("draft", 1, "the only draft comes out of draft-extend"),
    )


@pytest.mark.parametrize(("drafter", "backend"), [("mla", "flashinfer"), ("mha", "flashmla")])
def test_draft_extend_of_an_uncaptured_backend_is_left_out(drafter: Any, backend: str) -> None:
    plan = capture_plan((2,), (1,), drafter=drafter, draft_backend=backend)
    assert not any(shape.phase == "draft_extend" for shape in plan.shapes)
    (left_out,) = plan.exclusions
    assert backend in left_out.reason and drafter.upper() in left_out.reason


def test_graphs_switched_off_capture_nothing() -> None:
    plan = capture_plan((2,), (1, 2), drafter="mla", draft_backend="triton", switched_off="off")
    assert plan.shapes == ()
    assert {(e.phase, e.reason) for e in plan.exclusions} == {
        ("verify", "off"),
        ("draft", "off"),
        ("draft_extend", "off"),
    }


def test_no_speculation_captures_decode() -> None:
    plan = capture_plan((), (1, 4), drafter=None, draft_backend=None)
    assert plan.shapes == (Shape("decode", 1, 1), Shape("decode", 4, 1))


@given(max_running=st.integers(1, 300), lengths=LENGTHS)
def test_no_batch_up_to_the_limit_is_a_hole(max_running: int, lengths: tuple[int, ...]) -> None:
    sizes = batch_sizes(max_running)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_running
    plan = capture_plan(lengths, sizes, drafter="mla", draft_backend="triton")
    for batch in range(1, max_running + 1):
        for drafts in lengths:
            shape = plan.serving("verify", batch, drafts + 1)
            assert shape is not None and batch <= shape.batch <= max(batch * 1.25, batch + 2) + 44
        assert plan.serving("verify", batch, max(lengths) + 2) is None
    assert plan.serving("verify", max_running + 1, lengths[0] + 1) is None


@pytest.mark.parametrize("lengths", [(), (-1,), (0, 8)])
def test_impossible_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="length"):
        check_lengths(lengths, limit=7)


def test_a_server_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-running-requests is 0"):
        batch_sizes(0)


# --- SGLang's own rules --------------------------------------------------------


def target_runner(runner: Runner) -> Any:
    """A stand-in with exactly what `DecodeCudaGraphRunner.can_run_graph` reads."""
    return SimpleNamespace(
        ragged_verify_mode=False,
        captured_req_width=runner.rows,
        require_mlp_tp_gather=False,
        enable_pdmux=False,
        disable_padding=not runner.padding,
        max_bs=max(runner.batches),
        require_mlp_sync=runner.needs_peers,
        is_encoder_decoder=runner.encoder_decoder,
        enable_two_batch_overlap=runner.two_batch_overlap,
        model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: runner.ngram)),
        backend=SimpleNamespace(can_run=lambda _, key: key in runner.batches),
        _make_graph_key=lambda batch, **_: batch,
        _resolve_lora_variant=lambda _: None,
        _resolve_attention_variant=lambda *_: None,
        _sampling_variant=lambda _: None,
    )


def forward_batch(step: Step) -> Any:
    """A stand-in with what the three `can_run_graph` read of a batch."""
    import torch

    rows = step.batch * step.rows if step.input_rows is None else step.input_rows
    return SimpleNamespace(
        replace_embeds=object() if step.replaces_embeddings else None,
        spec_info=SimpleNamespace(num_tokens_per_req=step.rows),
        batch_size=step.batch,
        seq_lens=torch.zeros(step.batch),
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        can_run_decode_cuda_graph=step.peers_can_graph,
        can_run_dp_draft_cuda_graph=step.peers_can_graph,
        encoder_lens=torch.tensor(step.encoder_rows),
        can_run_tbo=step.two_batch_overlap_ready,
        input_ids=torch.zeros(rows),
    )


STEPS = st.builds(
    Step,
    batch=st.integers(1, 12),
    rows=st.integers(1, 4),
    replaces_embeddings=st.booleans(),
    peers_can_graph=st.booleans(),
    encoder_rows=st.sampled_from([(1,), (1, 0), (3, 2)]),
    two_batch_overlap_ready=st.booleans(),
    input_rows=st.sampled_from([None, 1, 8, 16]),
)
RUNNERS = st.builds(
    Runner,
    rows=st.integers(1, 4),
    batches=st.lists(st.integers(1, 10), min_size=1, max_size=5, unique=True).map(tuple),
    padding=st.booleans(),
    needs_peers=st.booleans(),
    encoder_decoder=st.booleans(),
    two_batch_overlap=st.booleans(),
    ngram=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(step=STEPS, runner=RUNNERS)
def test_target_rules_are_those_of_sglang(step: Step, runner: Runner) -> None:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    theirs = bool(DecodeCudaGraphRunner.can_run_graph(target_runner(runner), forward_batch(step)))
    assert theirs is (why_eager(step, runner) is None)


@settings(max_examples=200, deadline=None)
@given(step=STEPS, runner=RUNNERS, phase=st.sampled_from(["draft", "draft_extend"]))
def test_drafter_rules_are_those_of_sglang(step: Step, runner: Runner, phase: Any) -> None:
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

    kind = EAGLEDraftCudaGraphRunner if phase == "draft" else EAGLEDraftExtendCudaGraphRunner
    mine = Runner(runner.rows, runner.batches, phase, runner.padding, runner.needs_peers)
    theirs = bool(kind.can_run_graph(target_runner(mine), forward_batch(step)))
    assert theirs is (why_eager(step, mine) is None)


EAGER = [
    (Step(3, 4, replaces_embeddings=True), Runner(4, (1, 4)), "embeddings"),
    (Step(3, 3), Runner(4, (1, 4)), "3 rows a request, captured for 4"),
    (Step(5, 4), Runner(4, (1, 4)), "batch 5 is above the largest captured, 4"),
    (Step(3, 4), Runner(4, (1, 2, 4), padding=False), "batch 3 is not captured"),
    (Step(1, 4, peers_can_graph=False), Runner(4, (1,), needs_peers=True), "data-parallel"),
    (Step(1, 4, encoder_rows=(0,)), Runner(4, (1,), encoder_decoder=True), "encoder"),
    (
        Step(1, 4, two_batch_overlap_ready=False),
        Runner(4, (1,), two_batch_overlap=True),
        "two-batch overlap",
    ),
    (Step(2, 4, input_rows=7), Runner(4, (2,), ngram=True), "7 rows, captured for 8"),
]


@pytest.mark.parametrize(("step", "runner", "reason"), EAGER)
def test_each_exclusion_has_its_reason(step: Step, runner: Runner, reason: str) -> None:
    assert reason in (why_eager(step, runner) or "")


def test_a_missing_runner_is_a_reason() -> None:
    assert why_eager(Step(1, 4), None) == "no graph was captured for this phase"


# --- the real engine on a GPU ----------------------------------------------------


@pytest.mark.gpu
def test_a_served_batch_replays_graphs_only(tmp_path: pathlib.Path) -> None:
    """Every planned graph is captured, and no verify step of any batch size runs eagerly."""
    run_dir = tmp_path / "run"
    with Server(
        tmp_path, *SMALL, *drafter_flags(), environment={"FASTVERIFY_RUN_DIR": str(run_dir)}
    ) as server:
        server.wait_ready()
        for requests in (1, 2, 3, 5, 8):
            server.generate([f"{n} boats on the sea and" for n in range(requests)], 24)
        plan = planned_here()
        active = reports.read(run_dir, "active.json", reports.Active)
        counts = settled_counts(run_dir)
    assert active is not None
    for phase in ("verify", "draft", "draft_extend"):
        shapes = {(s.batch, s.rows) for s in plan.graphs.shapes if s.phase == phase}
        runner = active.captured[phase]
        assert shapes == {(batch, runner.rows) for batch in runner.batches}, phase
    assert counts.eager_steps == 0, counts.eager_reasons
    assert counts.graph_steps > 20
    assert {key.split(" x ")[0] for key in counts.steps} >= {"1", "8"}
    assert set(counts.accepted) <= set(range(4)) and len(counts.accepted) >= 3
    print(f"\n{counts}\n{active}")


def planned_here() -> LaunchPlan:
    """The plan of `--model tiny` on this machine."""
    return make_plan(gather(parse(["--model", "tiny", "--plan"])), dict(os.environ))


def settled_counts(run_dir: pathlib.Path) -> reports.VerifyCounts:
    """The observer's counters once they have stopped changing."""
    last = None
    for _ in range(20):
        time.sleep(1)
        now = reports.read(run_dir, "verify.json", reports.VerifyCounts)
        if now is not None and now == last:
            return now
        last = now
    raise AssertionError("the counters kept changing for 20 s after the last request")
