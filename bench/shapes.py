"""Model shapes of the benches, and the config of what one rank of TP=N holds.

Shapes come from the shipped presets, so that the launcher and the benches cannot disagree.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from typing import Any

import msgspec

from fastverify.errors import ConfigError

MODELS = ("kimi-k2.5", "kimi-k2.6", "deepseek-v3", "glm-5", "tiny")
GROUP = 32
MARLIN_TILE = 64
VOCABULARY_PAD = 64

# Exact MLA head sizes, so that every attention backend takes it; all else as small as can be.
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}

# What all these models have in common.
FAMILY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# What the bench measures where it is not the published checkpoint.
MEASURED_AS = {
    "deepseek-v3": "experts INT4 group 32 and the rest bf16; the published checkpoint is FP8",
    "glm-5": "experts INT4 group 32, dense MLA; the checkpoint is NVFP4 with sparse attention",
    "tiny": "all bf16",
}


class Shape(msgspec.Struct, frozen=True):
    """The whole model, before it is divided over ranks; field names are those of the HF config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    name: str = ""
    int4: bool = True
    note: str = ""


def shape(name: str) -> Shape:
    """The shape called name; ConfigError lists the known ones."""
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: --model takes one of {', '.join(MODELS)}.")
    if name == "tiny":
        fields = TINY
    else:
        text = (importlib.resources.files("fastverify.presets") / f"{name}.toml").read_text()
        config = tomllib.loads(text)["config"]
        fields = config.get("text_config", config)
    known = {field: fields[field] for field in Shape.__struct_fields__ if field in fields}
    return msgspec.convert(
        {**known, "name": name, "int4": name != "tiny", "note": MEASURED_AS.get(name, "")},
        type=Shape,
    )


def check_division(whole: Shape, tp: int, layers: int) -> None:
    """ConfigError unless every sharded size divides by tp and the layer count is in range."""
    tile = MARLIN_TILE if whole.int4 else 1
    sharded = {
        "attention heads": (whole.num_attention_heads, 1),
        "expert width": (whole.moe_intermediate_size, tile),
        "dense width": (whole.intermediate_size, 1),
    }

    def divides(ranks: int) -> bool:
        return all(size % (ranks * multiple) == 0 for size, multiple in sharded.values())

    if tp < 1 or not divides(tp):
        sizes = ", ".join(f"{what} {size}" for what, (size, _) in sharded.items())
        fits = ", ".join(str(ranks) for ranks in (1, 2, 4, 8, 16) if divides(ranks))
        raise ConfigError(
            f"--tp {tp} does not divide {whole.name} ({sizes}, experts in multiples of {tile}):"
            f" use {fits}."
        )
    least = whole.first_k_dense_replace + 2
    if not least <= layers <= whole.num_hidden_layers:
        raise ConfigError(
            f"--layers {layers}: {whole.name} has {whole.num_hidden_layers} layers and the bench"
            f" needs {least} for two MoE layers; pass {least} to {whole.num_hidden_layers}."
        )


def check_context(whole: Shape, contexts: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """ConfigError unless the longest context and its verify rows fit the model."""
    need = max(contexts) + max(rows)
    if need > whole.max_position_embeddings:
        raise ConfigError(
            f"context {max(contexts)} with {max(rows)} rows needs {need} positions and"
            f" {whole.name} has {whole.max_position_embeddings}: pass a shorter --contexts."
        )


def rank_config(whole: Shape, tp: int, layers: int) -> dict[str, Any]:
    """HF config of what one rank of TP=tp computes, cut to `layers` layers.

    The rank runs as a model of its own with tensor parallel size 1: heads, expert, dense and
    vocabulary widths are divided; the router, the latent projections and the norms are whole.
    """
    check_division(whole, tp, layers)
    vocabulary = -(-whole.vocab_size // tp)
    config: dict[str, Any] = {
        "vocab_size": -(-vocabulary // VOCABULARY_PAD) * VOCABULARY_PAD,
        "hidden_size": whole.hidden_size,
        "intermediate_size": whole.intermediate_size // tp,
        "moe_intermediate_size": whole.moe_intermediate_size // tp,
        "num_hidden_layers": layers,
        "first_k_dense_replace": whole.first_k_dense_replace,
        "num_attention_heads": whole.num_attention_heads // tp,
        "num_key_value_heads": whole.num_attention_heads // tp,
        "q_lora_rank": whole.q_lora_rank,
        "kv_lora_rank": whole.kv_lora_rank,
        "qk_nope_head_dim": whole.qk_nope_head_dim,
        "qk_rope_head_dim": whole.qk_rope_head_dim,
        "v_head_dim": whole.v_head_dim,
        "n_routed_experts": whole.n_routed_experts,
        "num_experts_per_tok": whole.num_experts_per_tok,
        "max_position_embeddings": whole.max_position_embeddings,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": whole.max_position_embeddings / 4096,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    } | FAMILY
    if whole.int4:
        config["quantization_config"] = int4_experts()
    return config


def draft_config(whole: Shape, tp: int, layers: int) -> dict[str, Any]:
    """HF config of one rank of a one-layer EAGLE-3 drafter for this target.

    Drafters of this family use MLA; the one for `tiny` does not, as SGLang's MLA drafter needs a
    GPU.
    """
    target = rank_config(whole, tp, layers)
    target.pop("quantization_config", None)
    if whole.name == "tiny":
        return llama_drafter(target)
    return target | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "draft_vocab_size": target["vocab_size"],
        "target_hidden_size": whole.hidden_size,
        "num_hidden_layers": 1,
        "eagle_config": {
            "use_aux_hidden_state": True,
            # SGLang reads these one layer later: its default layers 2, L/2 and L-3.
            "eagle_aux_hidden_state_layer_ids": [1, layers // 2 - 1, layers - 4],
        },
    }


def llama_drafter(target: dict[str, Any]) -> dict[str, Any]:
    """HF config of a one-layer EAGLE-3 drafter with plain attention."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    return {name: target[name] for name in (*same, "rms_norm_eps", "hidden_act")} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "draft_vocab_size": target["vocab_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": target["hidden_size"] // 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def int4_experts() -> dict[str, Any]:
    """compressed-tensors settings of Kimi-K2.5: routed experts INT4 group 32, all else bf16."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": weights,
            }
        },
    }


def rank_bytes(whole: Shape, tp: int, layers: int, tokens: int) -> dict[str, int]:
    """Device memory of one rank in bytes, by use, from the shape alone.

    experts: INT4 plus one bf16 scale per group, or bf16. kv: `tokens` latent rows in bf16.
    """
    per_weight_bytes = 0.5 + 2 / GROUP if whole.int4 else 2.0
    moe_layers = layers - whole.first_k_dense_replace
    heads = whole.num_attention_heads // tp
    expert = 3 * whole.hidden_size * whole.moe_intermediate_size // tp
    latent = whole.kv_lora_rank + whole.qk_rope_head_dim
    attention = (
        whole.hidden_size * (whole.q_lora_rank + latent)
        + whole.q_lora_rank * heads * (whole.qk_nope_head_dim + whole.qk_rope_head_dim)
        # kv_b and the two absorbed copies SGLang keeps beside it
        + 2 * whole.kv_lora_rank * heads * (whole.qk_nope_head_dim + whole.v_head_dim)
        + heads * whole.v_head_dim * whole.hidden_size
    )
    dense = 3 * whole.hidden_size * whole.intermediate_size // tp
    router = whole.hidden_size * whole.n_routed_experts
    return {
        "experts": int(moe_layers * whole.n_routed_experts * expert * per_weight_bytes),
        "shared_and_router": 2 * moe_layers * (expert + router),
        "attention": 2 * layers * attention,
        "dense": 2 * whole.first_k_dense_replace * dense,
        "vocabulary": 2 * 2 * whole.hidden_size * -(-whole.vocab_size // tp),
        "kv": 2 * layers * tokens * latent,
    }
