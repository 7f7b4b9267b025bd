"""The hooks on SGLang's all-reduce and layer boundaries: fakes for routing, the real names."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.layers.layer_boundary.output import UnreducedOutput
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.plugins.hook_registry import HookRegistry

from fastverify.comm.collective import Call, Collective, Fused
from fastverify.hooks import norm as norm_hooks
from fastverify.hooks import registry
from fastverify.hooks.all_reduce import AllReduce
from fastverify.hooks.norm import FusedNorm, plain_norm


class UpTo(Collective):
    """Takes calls of few rows; the sum is marked by adding 1."""

    name = "fake"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def why_not(self, call: Call) -> str | None:
        return None if call.rows <= self.rows else "too many rows"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        return x + 1

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        return x + 2, residual + 3


def group(name: str = "tp:0", world_size: int = 2) -> Any:
    return types.SimpleNamespace(unique_name=name, world_size=world_size)


def made(rows: int = 4) -> AllReduce:
    hooks = AllReduce(lambda runner: UpTo(rows))
    hooks.after_workspaces(None, types.SimpleNamespace(model_runner=None))
    return hooks


def original(answer: Any) -> tuple[Callable[..., Any], list[Any]]:
    seen: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1:])
        return answer

    return function, seen


def test_method_is_ours_where_the_collective_takes_the_call() -> None:
    hooks = made()
    function, seen = original("ca")
    assert hooks.around_resolve(function, group(), torch.zeros(4, 8)) == "fastverify"
    assert hooks.around_resolve(function, group(), torch.zeros(5, 8)) == "ca"
    assert hooks.around_resolve(function, group("pp:0"), torch.zeros(4, 8)) == "ca"
    assert len(seen) == 2


@pytest.mark.parametrize("method", ["fastverify", "auto"])
def test_out_of_place_call_is_ours(method: str) -> None:
    hooks = made()
    function, seen = original(torch.zeros(1))
    x = torch.zeros(4, 8)
    assert torch.equal(hooks.around_out_place(function, group(), x, method), x + 1)
    assert hooks.taken == 1 and not seen and not x.any()


def test_out_of_place_call_that_we_decline_goes_on() -> None:
    hooks = made()
    function, seen = original(torch.ones(1))
    hooks.around_out_place(function, group(), torch.zeros(5, 8), "auto")
    hooks.around_out_place(function, group(), torch.zeros(4, 8), "ca")
    hooks.around_out_place(function, group(), torch.zeros(5, 8), "fastverify")
    assert [arguments[1] for arguments in seen] == ["auto", "ca", "pynccl"]
    assert hooks.taken == 0


def test_cpu_goes_through_the_collective_only_in_its_group() -> None:
    hooks = made()
    function, seen = original(torch.ones(1))
    x = torch.zeros(4, 8)
    assert torch.equal(hooks.around_all_reduce(function, group(), x), x + 1)
    hooks.around_all_reduce(function, group(world_size=1), x)
    hooks.around_all_reduce(function, group("world:0"), x)
    assert len(seen) == 2


def test_the_collective_is_made_once() -> None:
    asked: list[Any] = []
    hooks = AllReduce(lambda runner: asked.append(runner))
    for number in range(2):
        hooks.after_workspaces(None, types.SimpleNamespace(model_runner=number))
    assert asked == [0]
    assert hooks.active() is None, "no collective leaves every all-reduce to SGLang"


class TestNorm:
    """`run` of both boundaries, with SGLang's own norm and a fake group."""

    @pytest.fixture(autouse=True)
    def one_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = group()
        monkeypatch.setattr(norm_hooks, "one_group", lambda: True)
        parallel = types.SimpleNamespace(tp_group=self.group)
        monkeypatch.setattr(norm_hooks, "get_parallel", lambda: parallel)

    def hooks(self, rows: int = 4) -> FusedNorm:
        return FusedNorm(made(rows).active)

    def plan(self, norm: Any | None = None) -> Any:
        return types.SimpleNamespace(norm=norm or RMSNorm(8))

    def test_after_attention(self) -> None:
        hooks = self.hooks()
        ours, theirs = hooks.around_ffn(lambda plan: ("theirs",), self.plan())
        assert theirs == "theirs"
        x, residual = torch.zeros(4, 8), torch.zeros(4, 8)
        normed, new = ours.run(x, residual, None)
        assert normed.eq(2).all() and new.eq(3).all() and not residual.any()
        assert ours.preserves_residual(residual, None)
        assert hooks.taken == {"after attention": 1, "after mlp": 0}

    def test_after_attention_declines_and_promises_nothing(self) -> None:
        ours, _ = self.hooks(rows=3).around_ffn(lambda plan: ("theirs",), self.plan())
        residual = torch.zeros(4, 8)
        assert ours.run(torch.zeros(4, 8), residual, None) is None
        assert not ours.preserves_residual(residual, None)

    def test_after_mlp(self) -> None:
        hooks = self.hooks()
        ours, theirs = hooks.around_attention(lambda plan, read=0: (read,), self.plan(), read=5)
        assert theirs == 5
        x, residual = torch.zeros(4, 8), torch.zeros(4, 8)
        owed = UnreducedOutput(partial=x, group=self.group)
        assert ours(owed, residual, None, None) is not None
        assert ours(owed, residual, None, torch.zeros(1)) is None
        assert ours(owed, None, None, None) is None
        assert ours(x, residual, None, None) is None
        assert ours(UnreducedOutput(partial=x, group=group()), residual, None, None) is None
        assert hooks.taken["after mlp"] == 1

    def test_other_types_are_declined(self) -> None:
        ours, _ = self.hooks().around_ffn(lambda plan: ("theirs",), self.plan())
        half = torch.zeros(4, 8, dtype=torch.bfloat16)
        assert ours.run(half, half, None) is None
        assert ours.run(torch.zeros(4, 8), half, None) is None


def test_only_the_plain_norm_is_ours() -> None:
    assert plain_norm(RMSNorm(8))
    assert not plain_norm(GemmaRMSNorm(8))
    assert not plain_norm(RMSNorm(8, cast_x_before_out_mul=True))
    assert not plain_norm(RMSNorm(8, fp32_residual=True))
    assert not plain_norm(RMSNorm(8, has_weight=False))
    assert not plain_norm(torch.nn.LayerNorm(8))


def test_every_target_exists_and_takes_the_hook() -> None:
    """In a fork of this process, since SGLang does not undo a patch."""
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        assert pool.submit(hooks_not_taken).result(timeout=100) == []


def hooks_not_taken() -> list[str]:
    """Apply our hooks to the real SGLang; returns targets that were not patched by it."""
    reduce = AllReduce(lambda runner: None)
    hooks = (*reduce.hooks(), *FusedNorm(reduce.active).hooks())
    before = [hook.target for hook in hooks if registry.took_effect(hook)]
    refused: list[str] = []
    registry.install(hooks, refused.append)
    HookRegistry.apply_hooks()
    return before + refused + [hook.target for hook in hooks if not registry.took_effect(hook)]
