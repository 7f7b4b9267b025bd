"""The attention hook: what it hands to our kernel, and what it leaves to SGLang untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastverify.attention import plan as planning

HEADS, WIDTH, LATENT = 16, 576, 512


class Recorder:
    """Stands in for the kernel and for SGLang's own functions."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "theirs"


def backend(**changes: Any) -> Any:
    """What the hook reads of a `TritonAttnBackend`."""
    pool = SimpleNamespace(
        dtype=torch.bfloat16, get_key_buffer=lambda layer: torch.zeros(64, 1, WIDTH).bfloat16()
    )
    metadata = SimpleNamespace(
        custom_mask=None,
        mask_indptr=None,
        swa_out_cache_loc=None,
        kv_indptr=torch.tensor([0, 5, 12, 12]),
    )
    facts: dict[str, Any] = {
        "use_mla": True,
        "dcp_size": 1,
        "topk": 1,
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "enable_deterministic": False,
        "token_to_kv_pool": pool,
        "forward_metadata": metadata,
        "req_to_token": torch.zeros(4, 128, dtype=torch.int32),
        "is_draft_runner": False,
        "num_head": HEADS,
        "device": "cpu",
        "_set_kv_buffer": Recorder(),
    }
    return SimpleNamespace(**(facts | changes))


def layer(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "tp_q_head_num": HEADS,
        "tp_k_head_num": 1,
        "qk_head_dim": WIDTH,
        "v_head_dim": LATENT,
        "k_scale": None,
        "logit_cap": 0,
        "sliding_window_size": -1,
        "layer_id": 3,
        "scaling": 0.1,
    }
    return SimpleNamespace(**(facts | changes))


def forward_batch(phase: str, batch: int = 2) -> Any:
    return SimpleNamespace(
        batch_size=batch,
        seq_lens=torch.tensor([9, 17]),
        req_pool_indices=torch.tensor([1, 2]),
        spec_info=None,
        forward_mode=SimpleNamespace(
            is_target_verify=lambda: phase == "verify",
            is_draft_extend_v2=lambda: phase == "draft_extend",
        ),
    )


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook with a plan for an H200 and a recorder for its kernel."""
    from fastverify.hooks import attention

    def h200(self: Any, backend: Any, batch: int, rows: int, kv: Any, heads: Any = None) -> Any:
        return planning.plan(
            arch="sm90", sms=132, heads=heads or HEADS, rows=rows, batch=batch, max_context=128
        )

    kernel = Recorder()
    monkeypatch.setattr(attention, "mla_verify", kernel)
    monkeypatch.setattr(attention, "KVWriteLoc", SimpleNamespace(for_batch=lambda *_, **__: "loc"))
    monkeypatch.setattr(attention.VerifyAttention, "_plan", h200)
    made = attention.VerifyAttention(decode=True)
    made.kernel = kernel  # type: ignore[attr-defined]
    return made


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.zeros(rows, HEADS * WIDTH, dtype=torch.bfloat16)
    return q, torch.zeros(rows, 1, WIDTH).bfloat16(), torch.zeros(rows, 1, LATENT).bfloat16()


def test_verify_goes_to_the_kernel_after_its_keys_are_written(hook: Any) -> None:
    where, theirs = backend(), Recorder()
    q, k, v = tensors(8)
    step = forward_batch("verify")
    out = hook.around_extend(theirs, where, q, k, v, layer(), step)
    assert out.shape == (8, HEADS * LATENT) and theirs.calls == []
    ((written, _),) = where._set_kv_buffer.calls
    assert written[2] == "loc" and written[3] is k and written[4] is v
    ((args, named),) = hook.kernel.calls
    plan, workspace, query, pool, table, lens = args
    assert (plan.rows, plan.batch, plan.heads) == (4, 2, HEADS)
    assert query.shape == (8, HEADS, WIDTH) and pool.shape == (64, 1, WIDTH)
    assert table is where.req_to_token and lens.tolist() == [9, 17]
    assert named["lens_are_prefix"] is True and named["table_rows"] is step.req_pool_indices
    assert "mask" not in named
    assert hook.served == {"verify": 1} and hook.describe() == "verify"


def test_draft_extend_reads_its_prefix_from_the_metadata(hook: Any) -> None:
    step = forward_batch("draft_extend")
    hook.around_extend(Recorder(), backend(), *tensors(6), layer(), step)
    ((args, named),) = hook.kernel.calls
    assert args[5].tolist() == [5, 7] and named["lens_are_prefix"] is True


def test_decode_counts_the_new_key_in_its_length(hook: Any) -> None:
    hook.around_decode(Recorder(), backend(), *tensors(2), layer(), forward_batch("decode"))
    ((args, named),) = hook.kernel.calls
    assert args[5].tolist() == [9, 17] and named["lens_are_prefix"] is False


def test_keys_already_in_the_pool_are_not_written_again(hook: Any) -> None:
    where = backend()
    q, k, v = tensors(8)
    step = forward_batch("verify")
    hook.around_extend(Recorder(), where, q, None, None, layer(), step)
    hook.around_extend(Recorder(), where, q, k, v, layer(), step, save_kv_cache=False)
    assert where._set_kv_buffer.calls == [] and len(hook.kernel.calls) == 2


def test_a_tree_passes_its_mask(hook: Any) -> None:
    where = backend(topk=2)
    where.forward_metadata.custom_mask = torch.ones(4, dtype=torch.uint8)
    where.forward_metadata.mask_indptr = torch.tensor([0, 2])
    hook.around_extend(Recorder(), where, *tensors(8), layer(), forward_batch("verify"))
    ((_, named),) = hook.kernel.calls
    assert named["mask"] is where.forward_metadata.custom_mask
    assert named["mask_indptr"] is where.forward_metadata.mask_indptr


@pytest.mark.parametrize(
    ("changes", "layer_changes", "extra", "reason"),
    [
        ({"use_mla": False}, {}, {}, "absorbed"),
        ({}, {"qk_head_dim": 192, "v_head_dim": 128}, {}, "absorbed"),
        ({}, {"tp_k_head_num": 2}, {}, "several KV heads"),
        ({"dcp_size": 2}, {}, {}, "context parallel"),
        ({}, {"k_scale": 0.5}, {}, "scaled"),
        ({}, {"logit_cap": 30}, {}, "cap or window"),
        ({}, {"sliding_window_size": 128}, {}, "cap or window"),
        ({}, {}, {"sinks": object()}, "sinks"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, {}, {}, "unified"),
        ({"enable_deterministic": True}, {}, {}, "deterministic"),
    ],
)
def test_what_it_declines_reaches_sglang_untouched(
    hook: Any, changes: Any, layer_changes: Any, extra: Any, reason: str
) -> None:
    where, theirs, what = backend(**changes), Recorder(), layer(**layer_changes)
    rows = 8 * what.tp_q_head_num * what.qk_head_dim
    q, k, v = torch.zeros(8, rows // 8), object(), object()
    step = forward_batch("verify")
    assert hook.around_extend(theirs, where, q, k, v, what, step, **extra) == "theirs"
    assert theirs.calls == [((where, q, k, v, what, step, True), extra)]
    assert where._set_kv_buffer.calls == [] and hook.kernel.calls == []
    assert reason in hook.describe()


def test_requests_of_different_lengths_are_declined(hook: Any) -> None:
    theirs = Recorder()
    hook.around_extend(theirs, backend(), *tensors(7), layer(), forward_batch("verify"))
    assert len(theirs.calls) == 1 and "row counts" in hook.describe()


def test_prefill_and_the_drafters_steps_stay_with_sglang(hook: Any) -> None:
    theirs = Recorder()
    hook.around_extend(theirs, backend(), *tensors(8), layer(), forward_batch("prefill"))
    drafter = backend(is_draft_runner=True)
    hook.around_decode(theirs, drafter, *tensors(2), layer(), forward_batch("decode"))
    assert len(theirs.calls) == 2 and hook.kernel.calls == [] and hook.declined == {}


def test_one_workspace_serves_all_and_only_grows(hook: Any) -> None:
    first = hook._reserve(100, "cpu")
    assert hook._reserve(50, "cpu") is first
    assert hook._reserve(200, "cpu").numel() == 200


def test_graph_state_reserves_for_the_largest_batch(hook: Any) -> None:
    where = backend()
    hook.after_graph_state(None, where, 4, 16)
    sizes = [hook._plan(where, batch, 4, "bf16").workspace_bytes for batch in (1, 2, 3, 4)]
    assert hook._memory.numel() == max(sizes)
    hook._memory = None
    hook.after_graph_state(None, backend(use_mla=False), 4, 16)
    assert hook._memory is None
