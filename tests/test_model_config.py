"""A model's shape as config.json states it: what is taken, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastverify.model.config import load_model_config, model_config
from fastverify.model.files import resolve
from tests.checkpoints import ABSENT, TARGET, int4, kimi, target, write_model
from tests.sentences import check_refused


def test_a_wrapped_text_model_is_read() -> None:
    config = model_config(kimi(), "kimi")
    assert config.architectures == ("KimiK25ForConditionalGeneration",)
    assert (config.model_type, config.is_mla, config.dtype) == ("kimi_k25", True, "bfloat16")
    assert (config.hidden, config.layers, config.heads, config.vocab) == (7168, 61, 64, 163840)
    assert (config.experts, config.experts_per_token, config.moe_intermediate) == (384, 8, 2048)
    assert (config.first_dense, config.shared_experts, config.max_context) == (1, 1, 262144)
    assert (config.qk_nope, config.qk_rope, config.v_head) == (128, 64, 128)
    assert config.quantization is not None
    assert (config.quantization.bits, config.quantization.group) == (4, 32)
    assert not config.quantization.is_float


def test_a_plain_model_takes_the_usual_defaults() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rope_scaling": {"rope_type": "yarn"},
        "kv_lora_rank": None,
    }
    config = model_config(raw, "m")
    assert (config.kv_heads, config.head_dim, config.is_mla) == (4, 16, False)
    assert (config.rope, config.quantization, config.max_context) == ("yarn", None, None)
    matrices = 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert config.weight_bytes == 2 * matrices


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_experts_per_tok",
)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str) -> None:
    check_refused(model_config, target(**{field: ABSENT}), "m", says=("m", field))


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("value", ["32", 0, -4, 1.5, True, [3], {}])
def test_a_wrong_field_is_shown(field: str, value: Any) -> None:
    message = check_refused(model_config, target(**{field: value}), "m", says=("m", field, 1))
    assert repr(value) in message


@pytest.mark.parametrize("value", [ABSENT, None, [], "DeepseekV3ForCausalLM", [1]])
def test_architectures_must_be_names(value: Any) -> None:
    check_refused(
        model_config, target(architectures=value), "m", says=("m", "architectures", "list")
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (int4(32), ("compressed-tensors", 4, 32, False)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", 8, 128, True)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, ("awq", 4, 64, False)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", 8, -1, False)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("modelopt", 4, 16, True)),
        ({"quant_method": "mxfp4"}, ("mxfp4", 4, 32, True)),
        ({"quant_method": "new"}, ("new", 16, -1, False)),
        ({}, ("unknown", 16, -1, False)),
    ],
)
def test_quantisation_formats(stated: dict[str, Any], expected: tuple[object, ...]) -> None:
    found = model_config(target(quantization_config=stated), "m").quantization
    assert found is not None
    assert (found.method, found.bits, found.group, found.is_float) == expected


def test_quantisation_must_be_an_object() -> None:
    check_refused(model_config, target(quantization_config="int4"), "m", says=("'int4'", "object"))


def test_modelopt_keeps_its_quantisation_beside_the_config(tmp_path: Path) -> None:
    name = write_model(tmp_path, TARGET)
    stated = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    config = load_model_config(resolve(name), dummy_weights=True)
    assert config is not None and config.quantization is not None
    assert (config.quantization.bits, config.quantization.group) == (4, 16)
