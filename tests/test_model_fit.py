"""Division of a model over GPUs, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.model.config import check_tp, model_config, weights_fit
from fastverify.model.fit import tp_problem
from fastverify.preset import load_preset
from tests.checkpoints import ABSENT, TARGET, int4, kimi, target
from tests.sentences import check_refused


@pytest.mark.parametrize(
    ("changes", "tp", "says"),
    [
        ({}, 3, ("8 attention heads", 3, "1, 2, 4, 8")),
        ({}, 0, ("--tp-size 0", "at least 1")),
        ({"num_attention_heads": 16}, 32, ("16 attention heads", 32)),
        ({"intermediate_size": 66}, 4, ("feed-forward width 66", 4, "1, 2")),
        ({"moe_intermediate_size": 6}, 4, ("expert width 6", 4, "1, 2")),
    ],
)
def test_what_does_not_divide_is_named(
    changes: dict[str, Any], tp: int, says: tuple[object, ...]
) -> None:
    check_refused(check_tp, model_config(target(**changes), "m"), tp, says=("m", *says))


@pytest.mark.parametrize(("kv_heads", "tp", "fits"), [(2, 4, True), (2, 8, True), (6, 4, False)])
def test_key_value_heads_are_split_or_copied(kv_heads: int, tp: int, fits: bool) -> None:
    raw = target(kv_lora_rank=ABSENT, num_key_value_heads=kv_heads, num_attention_heads=24)
    config = model_config(raw, "m")
    if fits:
        check_tp(config, tp)
    else:
        check_refused(check_tp, config, tp, says=(f"{kv_heads} key-value heads", tp))
    check_tp(model_config(target(num_key_value_heads=kv_heads), "latent"), tp)


@pytest.mark.parametrize(
    ("moe", "group", "tp", "fits"),
    [
        (2048, 32, 8, True),
        (512, 32, 8, True),
        (256, 32, 8, False),
        (512, 128, 4, True),
        (512, 128, 8, False),
    ],
)
def test_marlin_needs_whole_tiles_and_groups(moe: int, group: int, tp: int, fits: bool) -> None:
    raw = target(hidden_size=256, moe_intermediate_size=moe, quantization_config=int4(group))
    config = model_config(raw, "m")
    if fits:
        check_tp(config, tp)
    else:
        check_refused(check_tp, config, tp, says=(max(64, group), moe // tp, "Marlin"))
    unquantised = target(
        hidden_size=256, moe_intermediate_size=moe, quantization_config=int4(group, ("experts",))
    )
    check_tp(model_config(unquantised, "m"), tp)


def test_marlin_needs_a_hidden_size_of_whole_tiles() -> None:
    config = model_config(target(quantization_config=int4()), "m")
    check_refused(check_tp, config, 1, says=("hidden size", 128, 32, "no --tp-size is possible"))


def test_fp8_blocks_stay_whole() -> None:
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = model_config(target(moe_intermediate_size=512, quantization_config=stated), "m")
    check_tp(config, 4)
    check_refused(check_tp, config, 8, says=(64, 128, "1, 2, 4"))


@given(st.integers(1, 128), st.integers(1, 128), st.integers(1, 64))
def test_a_refusal_names_exactly_the_sizes_that_pass(heads: int, moe: int, tp: int) -> None:
    raw = target(num_attention_heads=heads, moe_intermediate_size=moe, intermediate_size=64)
    config = model_config(raw, "m")
    divides = heads % tp == 0 and moe % tp == 0 and 64 % tp == 0
    assert (tp_problem(config, tp) is None) == divides
    if not divides:
        message = check_refused(check_tp, config, tp, says=(tp,))
        listed = message.split("may be ")[1].rstrip(".").split(", ")
        assert all(heads % int(n) == 0 and moe % int(n) == 0 for n in listed)


@pytest.mark.parametrize(
    ("raw", "published_gb"),
    # Totals of the checkpoints' weight files; DeepSeek's is the main model without its MTP layer.
    [(kimi(), 595), (dict(load_preset("deepseek-v3").config), 671 + 2)],
)
def test_the_estimate_meets_published_sizes(raw: dict[str, Any], published_gb: float) -> None:
    assert model_config(raw, "m").weight_bytes / 1e9 == pytest.approx(published_gb, rel=0.02)


def test_weights_that_overfill_a_gpu_are_refused() -> None:
    config = model_config(kimi(), "kimi")
    share = weights_fit(config, [96 * 10**9] * 8, 8)
    assert config.weight_bytes / 8 < share < config.weight_bytes / 8 + 3e9
    check_refused(weights_fit, config, [96 * 10**9] * 4, 4, says=("kimi", "96.0 GB", "about", 4))
    check_refused(weights_fit, config, [96 * 10**9] * 7 + [24 * 10**9], 8, says=("24.0 GB", 8))
    check_refused(weights_fit, config, [96 * 10**9] * 4, 8, says=(8, 4, "--tp-size"))


@given(st.integers(0, 10**12), st.integers(1, 16))
def test_shares_cover_the_weights(size: int, gpus: int) -> None:
    config = model_config(TARGET, "m", disk_size=size)
    share = weights_fit(config, [10**13] * gpus, gpus)
    assert share * gpus >= size
    assert weights_fit(config, [share] * gpus, gpus) == share
    if share:
        check_refused(weights_fit, config, [share - 1] * gpus, gpus, says=(gpus,))
