"""Which hidden states a drafter is fed, and our reading of SGLang against SGLang."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastverify.errors import ConfigError
from fastverify.model.aux_layers import aux_layers
from tests.checkpoints import (
    ABSENT,
    GOAL,
    HALF,
    check,
    draft_config,
    draft_tensors,
    goal,
    good_map,
    refuse,
)
from tests.sentences import check_refused

BOTH = pytest.mark.parametrize("kind", ["mha", "mla"])


@pytest.mark.parametrize(
    ("architecture", "ids", "captured"),
    [
        ("DeepseekV3ForCausalLM", None, (2, 4, 5)),
        ("DeepseekV3ForCausalLM", [1, 3, 4], (2, 4, 5)),
        ("DeepseekV3ForCausalLM", [2, 4, 5], (2, 4, 5)),
        ("DeepseekV3ForCausalLM", [0, 7], (0, 7)),
        ("KimiK25ForConditionalGeneration", [1, 6], (2, 7)),
        ("Qwen3ForCausalLM", [2, 4, 5], (3, 5, 6)),
        ("Qwen3ForCausalLM", [7], (8,)),
        ("GptOssForCausalLM", [2, 8], (2, 8)),
        ("GptOssForCausalLM", [2, 6], (3, 7)),
    ],
)
@BOTH
def test_layers_are_counted_as_sglang_counts(
    architecture: str, ids: list[int] | None, captured: tuple[int, ...], kind: str
) -> None:
    raw = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    assert aux_layers(goal(architectures=[architecture]), raw, kind, "d") == captured


@BOTH
@pytest.mark.parametrize(
    ("layers", "ids", "says"),
    [
        (8, [1, 3, 7], (8, "0 to 7")),
        (8, [2, 8], (8, "0 to 7")),
        (8, [-1, 2], (-1,)),
        (48, [2, 30, 58], (58, 48)),
        (8, [2, 2, 5], ("2, 2, 5", "twice")),
        (6, None, ("2, 3, 3", "twice", 6)),
        (4, None, ("2, 2, 1", "twice", 4)),
        (2, None, ("layer 2", "has 2 layers")),
        (3, [-3, 2], (-3, 3)),
        (8, "2,4", ("'2,4'", "list")),
        (8, [1, 2.5], ("[1, 2.5]", "list")),
        (8, [True], ("[True]", "list")),
    ],
)
def test_layers_that_cannot_be_captured_are_refused(
    layers: int, ids: Any, says: tuple[object, ...], kind: str
) -> None:
    raw = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    message = check_refused(aux_layers, goal(num_hidden_layers=layers), raw, kind, "d", says=("d",))
    for part in says:
        assert str(part) in message


def test_the_count_must_be_the_one_fc_is_built_for() -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    llama = {"num_aux_hidden_states": 5, "eagle_config": ids}
    check_refused(aux_layers, GOAL, llama, "mha", "d", says=("d", 5, 3, "2, 4, 5"))
    # SGLang reads ids outside eagle_config for the drafter and not for the target.
    outside = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 5]}
    check_refused(aux_layers, GOAL, outside, "mla", "d", says=("d", 4, 3))
    assert aux_layers(GOAL, outside, "mha", "d") == (2, 4, 5)


def test_a_drafter_may_take_the_last_state_alone(tmp_path: Path) -> None:
    config = draft_config("mha", eagle_config={"use_aux_hidden_state": False})
    facts = check(tmp_path, config, draft_tensors("mha", fc__weight=ABSENT))
    assert (facts.aux_layers, facts.aux_count) == ((), 0)
    raw = {"eagle_config": {"use_aux_hidden_state": False}, "hidden_size": 16}
    check_refused(aux_layers, GOAL, raw, "mha", "d", says=("d", 16, 32))
    check_refused(
        aux_layers, GOAL, {"eagle_config": [1]}, "mha", "d", says=("eagle_config", "object")
    )


@BOTH
def test_fc_is_as_wide_as_the_states_it_joins(tmp_path: Path, kind: str) -> None:
    config = draft_config(kind, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 5]})
    refuse(tmp_path / "three", config, draft_tensors(kind), "fc.weight", "32, 96", "32, 128")
    facts = check(
        tmp_path / "four", config, draft_tensors(kind, fc__weight=np.zeros((32, 128), HALF))
    )
    assert (facts.aux_layers, facts.aux_count) == ((2, 4, 5, 6), 4)


@pytest.mark.engine
def test_sglang_reads_offsets_and_shifts_layers_as_we_say() -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("sglang.srt.models.llama_eagle3").LlamaForCausalLMEagle3
    mla = pytest.importorskip("sglang.srt.models.kimi_k25_eagle3").Eagle3DeepseekV2ForCausalLM
    d2t, t2d = good_map()
    for model in (llama, mla):
        read = SimpleNamespace(named_parameters=tuple, post_load_weights=lambda: None)
        model.load_weights(read, [("d2t", torch.tensor(d2t)), ("t2d", torch.tensor(t2d))])
        assert read.hot_token_id.tolist() == np.flatnonzero(t2d).tolist()
    targets = {
        "DeepseekV3ForCausalLM": "deepseek_v2",
        "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
        "GlmMoeDsaForCausalLM": "glm4_moe",
        "Glm4MoeForCausalLM": "glm4_moe",
        "Qwen3ForCausalLM": "qwen3",
        "GptOssForCausalLM": "gpt_oss",
    }
    for name, file in targets.items():
        model = getattr(pytest.importorskip(f"sglang.srt.models.{file}"), name)
        for ids in (None, [1, 3, 4], [2, 4, 5], [3, 6], [2, 8]):
            fake = SimpleNamespace(
                pp_group=SimpleNamespace(is_last_rank=True),
                config=SimpleNamespace(num_hidden_layers=8),
                model=SimpleNamespace(),
            )
            model.set_eagle3_layers_to_capture(fake, ids)
            raw = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
            try:
                ours = list(aux_layers(goal(architectures=[name]), raw, "mla", "d"))
            except ConfigError:
                assert max(fake.model.layers_to_capture) >= 8
            else:
                assert ours == fake.model.layers_to_capture, (name, ids)
