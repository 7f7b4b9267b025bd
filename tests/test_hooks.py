"""Hooks take effect or stop the process; the observer counts; the status table tells the truth."""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
import time
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastverify import plugin, reports, status
from fastverify.graphs import Runner
from tests.test_plan import kimi


@pytest.fixture
def registry() -> Iterator[Any]:
    """SGLang's own registry, empty before and after."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    apply_hooks = HookRegistry.apply_hooks
    yield HookRegistry
    HookRegistry.apply_hooks = apply_hooks
    HookRegistry.reset()


@pytest.fixture
def target() -> Iterator[types.ModuleType]:
    """A module `fake_sglang` with a class and a method to hook."""
    module = types.ModuleType("fake_sglang")

    class Worker:
        def verify(self, batch: int) -> int:
            return batch + 1

    module.Worker = Worker  # type: ignore[attr-defined]
    sys.modules["fake_sglang"] = module
    yield module
    del sys.modules["fake_sglang"]


def around(original: Any, worker: Any, batch: int) -> int:
    return 10 * int(original(worker, batch))


def hook(name: str) -> Any:
    from sglang.srt.plugins.hook_registry import HookType

    from fastverify.hooks.registry import Hook

    return Hook(name, around, HookType.AROUND)


def test_a_hook_takes_effect_and_is_proved(registry: Any, target: Any) -> None:
    from fastverify.hooks.registry import install, took_effect

    refusals: list[str] = []
    made = hook("fake_sglang.Worker.verify")
    install([made], refusals.append)
    assert target.Worker().verify(1) == 2 and not took_effect(made)
    registry.apply_hooks()
    assert target.Worker().verify(1) == 20 and took_effect(made)
    assert refusals == []


def test_a_hook_on_a_missing_name_is_refused_by_name(registry: Any, target: Any) -> None:
    from fastverify.hooks.registry import install

    refusals: list[str] = []
    install([hook("fake_sglang.Worker.verify"), hook("fake_sglang.gone")], refusals.append)
    registry.apply_hooks()
    (sentence,) = refusals
    assert "fake_sglang.gone" in sentence and "fake_sglang.Worker" not in sentence
    assert "FASTVERIFY_DISABLE=1" in sentence


def test_a_hook_that_is_overwritten_later_is_noticed(registry: Any, target: Any) -> None:
    from fastverify.hooks.registry import install, took_effect

    made = hook("fake_sglang.Worker.verify")
    install([made], lambda sentence: None)
    registry.apply_hooks()
    target.Worker.verify = lambda self, batch: batch
    assert not took_effect(made)


def test_the_check_runs_once_and_gives_the_registry_back(registry: Any, target: Any) -> None:
    from fastverify.hooks.registry import install

    before = registry.apply_hooks
    install([hook("fake_sglang.Worker.verify")], lambda sentence: None)
    registry.apply_hooks()
    assert registry.apply_hooks == before


def test_every_real_hook_applies_to_the_pinned_sglang(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a child process, because it patches SGLang for good."""
    import subprocess

    code = (
        "from fastverify.hooks import all_hooks, registry\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "hooks = all_hooks(None, {'FASTVERIFY_ATTENTION': 'verify+decode'})\n"
        "refused = []\n"
        "registry.install(hooks, refused.append)\n"
        "HookRegistry.apply_hooks()\n"
        "print(len(hooks), refused)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    count, refused = done.stdout.strip().splitlines()[-1].split(" ", 1)
    assert int(count) >= 6 and refused == "[]"


# --- the entry point -------------------------------------------------------------


def in_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "in_scheduler", lambda: True)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


def test_outside_a_scheduler_nothing_is_registered(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert not plugin.in_scheduler()
    plugin.register()
    assert not registry._hooks


def test_disabled_leaves_sglang_untouched(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_scheduler(monkeypatch)
    monkeypatch.setenv("FASTVERIFY_DISABLE", "1")
    before = registry.apply_hooks
    plugin.register()
    assert not registry._hooks and registry.apply_hooks == before


def test_another_sglang_ends_the_process_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_scheduler(monkeypatch)
    monkeypatch.setenv("FASTVERIFY_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(SystemExit) as ended:
        plugin.register()
    assert ended.value.code == 2
    (sentence,) = reports.failures(tmp_path)
    assert "0.5.24" in sentence and "0.5.23" in sentence
    assert capsys.readouterr().err == f"fastverify: {sentence}\n"


# --- the observer ----------------------------------------------------------------


def worker(runner: Any, rows: int = 4, device: str = "cuda") -> Any:
    target = SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=runner))
    return SimpleNamespace(speculative_num_draft_tokens=rows, target_worker=target, device=device)


def batch(requests: int, *, idle: bool = False, greedy: bool = True) -> Any:
    return SimpleNamespace(
        seq_lens=[7] * requests,
        forward_mode=SimpleNamespace(is_idle=lambda: idle),
        sampling_info=SimpleNamespace(is_all_greedy=greedy),
    )


def served(graph: bool) -> Any:
    return lambda *_: SimpleNamespace(can_run_cuda_graph=graph)


def test_the_observer_counts_graph_and_eager_steps_with_the_reason(tmp_path: pathlib.Path) -> None:
    from fastverify.hooks.verify import VerifyObserver

    observer = VerifyObserver(tmp_path)
    runner = SimpleNamespace(captured_req_width=4, capture_bs=[1, 2, 4])
    observer.around_verify(served(True), worker(runner), batch(2))
    observer.around_verify(served(False), worker(runner), batch(5))
    observer.around_verify(served(False), worker(runner), batch(5))
    observer.around_verify(served(False), worker(None), batch(1))
    observer.around_verify(served(True), worker(runner), batch(2, idle=True))
    observer.before_complete(None, [0, 3, 3], batch_size=3)
    counts = observer.counts
    assert (counts.graph_steps, counts.eager_steps) == (1, 3)
    assert counts.steps == {"2 x 4, graph": 1, "5 x 4, eager": 2, "1 x 4, eager": 1}
    assert counts.accepted == {0: 1, 3: 2}
    assert counts.eager_reasons == {
        "batch 5 is above the largest captured, 4": 2,
        "no graph was captured for this phase": 1,
    }
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        written = reports.read(tmp_path, "verify.json", reports.VerifyCounts)
        if written == counts:
            break
        time.sleep(0.05)
    assert written == counts


def test_the_observer_passes_results_through() -> None:
    from fastverify.hooks.verify import VerifyObserver

    answer = object()
    observer = VerifyObserver(None)
    kept: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        kept.append((args, kwargs))
        return SimpleNamespace(can_run_cuda_graph=True, answer=answer)

    who, what = worker(None), batch(1)
    result = observer.around_verify(original, who, what, "proxy", grammar_barrier=3)
    assert result.answer is answer
    assert kept == [((who, what, "proxy"), {"grammar_barrier": 3})]


def test_a_sampled_request_on_the_cpu_is_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from fastverify.hooks.verify import VerifyObserver

    observer = VerifyObserver(None)
    observer.around_verify(served(False), worker(None), batch(1, greedy=False))
    observer.around_verify(served(False), worker(None, device="cpu"), batch(1))
    assert "greedily" not in caplog.text
    for _ in range(2):
        observer.around_verify(served(False), worker(None, device="cpu"), batch(1, greedy=False))
    assert caplog.text.count("greedily at any temperature") == 1


# --- the status table ------------------------------------------------------------


def active(**changes: Any) -> reports.Active:
    captured = {
        "verify": Runner(3, (*range(1, 9), 10, 12, 14, 16)),
        "draft": Runner(1, (*range(1, 9), 10, 12, 14, 16)),
        "draft_extend": Runner(3, (1, 2)),
    }
    facts: dict[str, Any] = {
        "device": "cuda",
        "tp": 8,
        "drafts": 2,
        "attention": {"target": "TritonAttnBackend"},
        "captured": captured,
        "hooks": ("a", "b"),
        "all_reduce": "NCCL",
    }
    return reports.Active(**(facts | changes))


def row(rows: list[status.Row], what: str) -> status.Row:
    (found,) = (r for r in rows if r[0] == what)
    return found


def test_status_compares_plan_and_server() -> None:
    rows = status.rows(kimi(), active())
    assert row(rows, "speculation") == ("speculation", "2 drafts a step", "2 drafts a step", "")
    assert row(rows, "verify graphs")[1:] == ("batch 1-8, 10, 12, 14, 16",) * 2 + ("",)
    extend = row(rows, "draft-extend graphs")
    assert extend[2] == "batch 1-2" and extend[3]
    assert row(rows, "MLA kernel")[1:3] == ("fastverify", "none")


def test_status_without_graphs_gives_the_plans_reason() -> None:
    plan = kimi("--speculative-num-steps", "1")
    rows = status.rows(plan, active(drafts=1, captured={}))
    assert row(rows, "draft graphs")[3] == "the only draft comes out of draft-extend"
    assert row(rows, "verify graphs")[3] == "not captured"


def test_status_on_the_cpu_says_what_does_not_exist_there() -> None:
    rows = status.rows(None, active(device="cpu", captured={}, all_reduce="gloo"))
    assert row(rows, "times")[2] == "meaningless"
    assert "greedily" in row(rows, "sampled verify")[3]
    assert row(rows, "verify graphs")[3] == "no graphs on the CPU"


def test_status_without_speculation_shows_decode() -> None:
    plan = kimi("--fastverify-speculation", "off", machine="two-sockets")
    rows = status.rows(plan, active(drafts=None, captured={"decode": Runner(1, (1, 2))}))
    assert row(rows, "speculation")[1:3] == ("off", "off")
    assert row(rows, "decode graphs")[2] == "batch 1-2"
