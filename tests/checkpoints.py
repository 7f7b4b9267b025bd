"""Small checkpoints on disk: a target's config and EAGLE-3 drafters of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fastverify.model.config import ModelConfig, model_config
from fastverify.model.drafter import DrafterFacts, check_drafter
from fastverify.preset import load_preset
from tests.sentences import check_refused

TARGET: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 1024,
}
KINDS = {"mha": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
DRAFT_VOCAB = 24
ABSENT = object()
HALF = np.float16


def draft_config(kind: str, **changes: Any) -> dict[str, Any]:
    """A drafter's config.json that fits TARGET; ABSENT drops a field."""
    config: dict[str, Any] = {
        "architectures": [KINDS[kind]],
        "model_type": "llama" if kind == "mha" else "kimi_k2",
        "vocab_size": 96,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    if kind == "mla":
        mla = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        config |= {name: TARGET[name] for name in mla}
    config |= changes
    return {name: value for name, value in config.items() if value is not ABSENT}


def good_map() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """d2t and t2d in which every fourth target id has a draft id."""
    ids = np.arange(0, 96, 4)
    flags = np.zeros(96, dtype=bool)
    flags[ids] = True
    return ids - np.arange(DRAFT_VOCAB), flags


def draft_tensors(kind: str, **changes: Any) -> dict[str, Any]:
    """A drafter's tensors that fit draft_config(kind); ABSENT drops one (dots as `__`)."""
    d2t, t2d = good_map()
    layer = "midlayer" if kind == "mha" else "layers.0"
    tensors: dict[str, Any] = {
        "fc.weight": np.zeros((32, 96), np.float16),
        "norm.weight": np.ones(32, np.float16),
        "lm_head.weight": np.zeros((DRAFT_VOCAB, 32), np.float16),
        f"{layer}.mlp.gate_proj.weight": np.zeros((48, 32), np.float16),
        f"{layer}.self_attn.kv_b_proj.weight": np.zeros((64, 16), np.float16),
        "d2t": d2t,
        "t2d": t2d,
    }
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in tensors.items() if value is not ABSENT}


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Any] | None = None) -> str:
    """Write a checkpoint and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


def target(**changes: Any) -> dict[str, Any]:
    """TARGET with fields changed; ABSENT drops one."""
    raw = {**TARGET, **changes}
    return {name: value for name, value in raw.items() if value is not ABSENT}


KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]


def int4(group: int = 32, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """A compressed-tensors quantization_config."""
    weights = {"num_bits": 4, "group_size": group, "type": "int"}
    return {
        "quant_method": "compressed-tensors",
        "ignore": list(ignore),
        "config_groups": {"group_0": {"weights": weights}},
    }


def kimi() -> dict[str, Any]:
    """Kimi-K2.5 with the ignore list of its published config.json."""
    raw = dict(load_preset("kimi-k2.5").config)
    raw["text_config"] = {**raw["text_config"], "quantization_config": int4(32, tuple(KIMI_IGNORE))}
    return raw


def goal(**changes: Any) -> ModelConfig:
    """The shape of TARGET with fields changed."""
    return model_config({**TARGET, **changes}, "goal")


GOAL = model_config(TARGET, "goal")


def check(folder: Path, config: dict[str, Any], tensors: dict[str, Any] | None) -> DrafterFacts:
    """Write a drafter and check it against GOAL."""
    facts = check_drafter(GOAL, write_model(folder, config, tensors))
    assert facts is not None
    return facts


def refuse(folder: Path, config: dict[str, Any], tensors: dict[str, Any], *says: object) -> str:
    """Write a drafter that must be refused by name."""
    name = write_model(folder, config, tensors)
    return check_refused(check_drafter, GOAL, name, says=(name, *says))
