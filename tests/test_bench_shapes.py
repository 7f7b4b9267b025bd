"""Shapes of one rank: division, memory, and the one sentence of each refusal."""

from __future__ import annotations

import pytest

from bench import shapes
from fastverify.errors import ConfigError


def test_kimi_rank_of_eight_is_an_eighth_of_what_is_sharded() -> None:
    config = shapes.rank_config(shapes.shape("kimi-k2.5"), 8, 61)
    assert config["num_attention_heads"] == 8
    assert config["moe_intermediate_size"] == 256
    assert config["intermediate_size"] == 2304
    assert config["vocab_size"] == 20480
    # The router, the latent projections and the depth are whole on every rank.
    assert config["n_routed_experts"] == 384
    assert config["q_lora_rank"] == 1536
    assert config["num_hidden_layers"] == 61
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (4, 32)


def test_kimi_memory_is_that_of_the_checkpoint() -> None:
    kimi = shapes.shape("kimi-k2.5")
    whole = sum(shapes.rank_bytes(kimi, 1, 61, 0).values())
    assert 540e9 < whole < 610e9
    eighth = shapes.rank_bytes(kimi, 8, 61, 0)
    assert eighth["experts"] * 8 == shapes.rank_bytes(kimi, 1, 61, 0)["experts"]
    assert shapes.rank_bytes(kimi, 8, 61, 32768)["kv"] == 2 * 61 * 32768 * 576


@pytest.mark.parametrize("name", shapes.MODELS)
def test_every_model_has_a_rank(name: str) -> None:
    whole = shapes.shape(name)
    tp = 1 if name == "tiny" else 8
    config = shapes.rank_config(whole, tp, whole.num_hidden_layers)
    assert config["hidden_size"] == whole.hidden_size
    draft = shapes.draft_config(whole, tp, whole.num_hidden_layers)
    assert draft["num_hidden_layers"] == 1
    assert "quantization_config" not in draft


@pytest.mark.parametrize("layers", [8, 61])
def test_mla_drafter_reads_three_different_layers(layers: int) -> None:
    draft = shapes.draft_config(shapes.shape("kimi-k2.5"), 8, layers)
    ids = draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [i + 1 for i in ids] == [2, layers // 2, layers - 3]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("tp", "layers", "words"),
    [
        (3, 61, "--tp 3 does not divide kimi-k2.5"),
        (64, 61, "use 1, 2, 4, 8, 16"),
        (0, 61, "--tp 0"),
        (8, 62, "--layers 62: kimi-k2.5 has 61 layers"),
        (8, 2, "pass 3 to 61"),
    ],
)
def test_bad_division_is_one_sentence(tp: int, layers: int, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        shapes.rank_config(shapes.shape("kimi-k2.5"), tp, layers)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_context_beyond_the_model_and_unknown_model() -> None:
    with pytest.raises(ConfigError, match="needs 4097 positions and tiny has 4096"):
        shapes.check_context(shapes.shape("tiny"), (4094, 64), (1, 3))
    shapes.check_context(shapes.shape("tiny"), (4093,), (1, 3))
    with pytest.raises(ConfigError, match=r"unknown model 'kimi': --model takes one of kimi-k2\.5"):
        shapes.shape("kimi")
