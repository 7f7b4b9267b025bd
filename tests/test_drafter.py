"""Drafters against their target: each way not to fit is refused with what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastverify.model.drafter import check_drafter
from tests.checkpoints import (
    ABSENT,
    DRAFT_VOCAB,
    GOAL,
    HALF,
    check,
    draft_config,
    draft_tensors,
    refuse,
    write_model,
)
from tests.sentences import check_refused

BOTH = pytest.mark.parametrize("kind", ["mha", "mla"])


@BOTH
def test_a_fitting_drafter_passes_without_a_word(tmp_path: Path, kind: str) -> None:
    facts = check(tmp_path, draft_config(kind), draft_tensors(kind))
    assert (facts.kind, facts.layers, facts.draft_vocab) == (kind, 1, DRAFT_VOCAB)
    assert (facts.aux_layers, facts.aux_count) == ((2, 4, 5), 3)
    assert (facts.map_checked, facts.unchecked, facts.warnings) == (True, (), ())
    assert facts.config.weights_on_disk


@BOTH
def test_a_whole_vocabulary_needs_no_map(tmp_path: Path, kind: str) -> None:
    tensors = draft_tensors(kind, d2t=ABSENT, t2d=ABSENT, lm_head__weight=np.zeros((96, 32), HALF))
    facts = check(tmp_path, draft_config(kind, draft_vocab_size=96), tensors)
    assert (facts.draft_vocab, facts.map_checked, facts.warnings) == (96, True, ())


@BOTH
def test_the_targets_head_can_be_shared(tmp_path: Path, kind: str) -> None:
    tensors = draft_tensors(kind, d2t=ABSENT, t2d=ABSENT, lm_head__weight=ABSENT)
    assert check(tmp_path, draft_config(kind, draft_vocab_size=None), tensors).draft_vocab == 96


def test_only_the_llama_class_strips_a_model_prefix(tmp_path: Path) -> None:
    for kind in ("mha", "mla"):
        tensors = {
            name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": value
            for name, value in draft_tensors(kind).items()
        }
        if kind == "mha":
            check(tmp_path / kind, draft_config(kind), tensors)
        else:
            refuse(tmp_path / kind, draft_config(kind), tensors, "norm.weight", "random")


def test_a_narrower_drafter_brings_its_own_embedding(tmp_path: Path) -> None:
    config = draft_config("mha", hidden_size=16, target_hidden_size=32)
    tensors = draft_tensors(
        "mha",
        fc__weight=np.zeros((16, 96), HALF),
        norm__weight=np.zeros(16, HALF),
        lm_head__weight=np.zeros((DRAFT_VOCAB, 16), HALF),
        embed_tokens__weight=np.zeros((96, 16), HALF),
    )
    check(tmp_path / "with", config, tensors)
    del tensors["embed_tokens.weight"]
    refuse(tmp_path / "without", config, tensors, "embed_tokens.weight", "96, 16")


def test_what_is_not_on_this_disk_is_not_judged(tmp_path: Path) -> None:
    assert check_drafter(GOAL, "owner/name", cache_dir=tmp_path) is None


def test_unread_weights_are_listed(tmp_path: Path) -> None:
    name = write_model(tmp_path, draft_config("mha"))
    check_refused(check_drafter, GOAL, name, says=(name, "no weight files"))
    facts = check_drafter(GOAL, name, dummy_weights=True)
    assert facts is not None and not facts.map_checked
    assert facts.unchecked and "random" in facts.unchecked[0]
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    facts = check_drafter(GOAL, name)
    assert facts is not None and not facts.map_checked
    assert facts.unchecked and "safetensors" in facts.unchecked[0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Eagle3LlamaForCausalLM", "another engine"),
        ("LlamaForCausalLMEagle", "EAGLE 1 or 2"),
        ("EagleDeepSeekMTPModel", "(MTP)"),
        ("DeepseekV3ForCausalLMNextN", "(MTP)"),
        ("DFlashDraftModel", "DFlash"),
        ("MedusaModel", "another method"),
        ("KimiK25ForConditionalGeneration", "full model"),
        ("LlamaForCausalLM", "full model"),
    ],
)
def test_other_architectures_are_told_apart(tmp_path: Path, name: str, what: str) -> None:
    message = refuse(
        tmp_path, draft_config("mha", architectures=[name]), draft_tensors("mha"), name
    )
    assert what in message
    assert "LlamaForCausalLMEagle3 or Eagle3DeepseekV2ForCausalLM" in message


@BOTH
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 64}, ("hidden_size", 64, 32, "goal")),
        ({"target_hidden_size": 40}, ("target_hidden_size", 40, 32)),
        ({"vocab_size": 128}, ("vocab_size", 128, 96)),
        ({"vocab_size": 24}, ("vocab_size", 24, 96)),
        ({"draft_vocab_size": 97}, ("draft_vocab_size", 97, 96)),
        ({"draft_vocab_size": "24"}, ("draft_vocab_size", "'24'")),
        ({"tie_word_embeddings": True}, ("ties", 96, DRAFT_VOCAB)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", 0)),
        ({"hidden_size": ABSENT}, ("hidden_size",)),
        (
            {"hidden_size": 16, "target_hidden_size": 32, "draft_vocab_size": None},
            ("output head", 16, 32),
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], says: tuple[object, ...]
) -> None:
    message = refuse(tmp_path, draft_config(kind, **changes), draft_tensors(kind))
    for part in says:
        assert str(part) in message


def test_each_kind_has_its_own_rules(tmp_path: Path) -> None:
    absent = draft_config("mha", draft_vocab_size=ABSENT)
    refuse(tmp_path / "a", absent, draft_tensors("mha"), "draft_vocab_size", 96, "null")
    two = draft_config("mla", num_hidden_layers=2)
    refuse(tmp_path / "b", two, draft_tensors("mla"), "num_hidden_layers", 2, 1)
    dense = draft_config("mla", q_lora_rank=None)
    refuse(tmp_path / "c", dense, draft_tensors("mla"), "q_lora_rank", 0)
    packed = draft_tensors("mla", layers__0__self_attn__kv_b_proj__weight=np.zeros(4, np.int8))
    refuse(tmp_path / "d", draft_config("mla"), packed, "kv_b_proj", "I8", "BF16")


def test_more_layers_of_the_llama_class_must_all_be_there(tmp_path: Path) -> None:
    config = draft_config("mha", num_hidden_layers=2)
    refuse(tmp_path / "one", config, draft_tensors("mha"), "decoder layer 1", "layers.1.*")
    tensors = draft_tensors("mha", layers__1__mlp__gate_proj__weight=np.zeros((4, 4), HALF))
    facts = check(tmp_path / "two", config, tensors)
    assert any("2 layers" in warning for warning in facts.warnings)


@BOTH
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight"])
def test_absent_tensors_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    tensors = draft_tensors(kind, **{name.replace(".", "__"): ABSENT})
    refuse(tmp_path, draft_config(kind), tensors, name, "random")


@BOTH
@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("fc.weight", (32, 64), "32, 96"),
        ("fc.weight", (32, 128), "32, 96"),
        ("lm_head.weight", (32, 32), f"{DRAFT_VOCAB}, 32"),
        ("lm_head.weight", (DRAFT_VOCAB, 16), f"{DRAFT_VOCAB}, 32"),
        ("embed_tokens.weight", (95, 32), "96, 32"),
        ("norm.weight", (16,), "32"),
    ],
)
def test_wrong_shapes_are_refused(
    tmp_path: Path, kind: str, name: str, shape: tuple[int, ...], wanted: str
) -> None:
    tensors = draft_tensors(kind, **{name.replace(".", "__"): np.zeros(shape, HALF)})
    found = ", ".join(map(str, shape))
    refuse(tmp_path, draft_config(kind), tensors, name, f"[{found}]"[1:-1], wanted)


def test_a_packed_matrix_is_not_called_absent(tmp_path: Path) -> None:
    tensors = draft_tensors("mha", fc__weight=ABSENT, fc__weight_packed=np.zeros(4, np.int32))
    check(tmp_path, draft_config("mha"), tensors)


def test_declared_quantisation_without_a_quantised_tensor_is_suspicious(tmp_path: Path) -> None:
    config = draft_config("mha", quantization_config={"quant_method": "fp8"})
    facts = check(tmp_path, config, draft_tensors("mha"))
    assert any("fp8" in warning and "F16" in warning for warning in facts.warnings)
