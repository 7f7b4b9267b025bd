"""Two EAGLE-3 drafters with hand-made weights that agree with the target some of the time.

At position p a drafter sees the embedding of token p + 1 and, through `fc`, the target's hidden
state at p, which is embedding(p) + context(p). One attention layer subtracts embedding(p), read
from the previous position, and adds embedding(p + 1): the target's state at p + 1 with the context
of p. Each further step moves on in the same way with the context frozen, so acceptance falls with
every step, and a wrong aux layer, position, cache slot or mask costs acceptance.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fastverify.tiny.config import CONFIG as TARGET
from fastverify.tiny.config import HIDDEN, LAYERS, VOCAB
from fastverify.tiny.target import CONSTANT, CONSTANT_CHANNEL, Tensors
from fastverify.tiny.tokenizer import BOS, END, vocabulary

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "target_hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": TARGET["max_position_embeddings"],
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "eagle_config": {
        "use_aux_hidden_state": True,
        # Counted after the layer, as published drafters do: SGLang adds 1 when the first is 1.
        "eagle_aux_hidden_state_layer_ids": [1, LAYERS // 2 - 1, LAYERS - 4],
    },
}

_LLAMA_HEADS, _LLAMA_HEAD = 8, 64
_LLAMA_THETA = 10000.0
LLAMA_CONFIG = _COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": 512,
    "num_attention_heads": _LLAMA_HEADS,
    "num_key_value_heads": _LLAMA_HEADS,
    "head_dim": _LLAMA_HEAD,
    "rope_theta": _LLAMA_THETA,
    "mlp_bias": False,
}

MLA_CONFIG = (
    _COMMON
    | {
        key: TARGET[key]
        for key in TARGET
        if key.endswith(("_head_dim", "_lora_rank", "attention_heads", "value_heads"))
        or key.startswith("rope_")
    }
    | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "draft_vocab_size": VOCAB,
    }
)

# Rotary pairs that carry position, fastest first, and the score they add up to at the position
# looked for. Anywhere else within 32768 positions it is at least 14 lower: a share under 1e-6.
_PAIRS, _PEAK = 8, 120.0


def draft_tokens() -> torch.Tensor:
    """Target ids of the Llama drafter's vocabulary, ascending: every word, then fillers."""
    words = vocabulary()[1]
    others = [token for token in range(VOCAB) if token not in words]
    return torch.tensor(sorted([*words, *others[: LLAMA_CONFIG["draft_vocab_size"] - len(words)]]))


def llama_tensors(target: Tensors) -> Tensors:
    """The multi-head drafter with a reduced vocabulary and its maps `d2t` and `t2d`."""
    chosen = draft_tokens()
    width = _LLAMA_HEADS * _LLAMA_HEAD
    angles = [_LLAMA_THETA ** (-pair / (_LLAMA_HEAD // 2)) for pair in range(_PAIRS)]
    query, key = (torch.zeros(width, 2 * HIDDEN) for _ in range(2))
    # Both sides read the constant channel, CONSTANT after the norm.
    weight = math.sqrt(_PEAK / _PAIRS * math.sqrt(_LLAMA_HEAD)) / CONSTANT
    for head in range(_LLAMA_HEADS):
        back = _look_back(head, _LLAMA_HEADS)
        for pair, angle in enumerate(angles):
            # Rotary halves: dimension `pair` turns with `pair + 32`.
            row = head * _LLAMA_HEAD + pair
            key[row, CONSTANT_CHANNEL] = weight
            query[row, CONSTANT_CHANNEL] = weight * math.cos(back * angle)
            query[row + _LLAMA_HEAD // 2, CONSTANT_CHANNEL] = -weight * math.sin(back * angle)
    identity = torch.eye(HIDDEN)
    return _shared(target, target["lm_head.weight"][chosen]) | {
        "d2t": chosen - torch.arange(len(chosen)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True),
        "midlayer.self_attn.q_proj.weight": query.bfloat16(),
        "midlayer.self_attn.k_proj.weight": key.bfloat16(),
        "midlayer.self_attn.v_proj.weight": _embedding_half(identity.repeat(2, 1)),
        "midlayer.self_attn.o_proj.weight": torch.cat([identity, -identity], 1).bfloat16(),
    }


def mla_tensors(target: Tensors) -> Tensors:
    """The same drafter with latent attention, the target's head sizes and the whole vocabulary."""
    rank, latent = MLA_CONFIG["q_lora_rank"], MLA_CONFIG["kv_lora_rank"]
    query_a, query_b, rotary_key = _mla_positions()
    key_value_b, output = _mla_copies()
    latent_a = torch.eye(latent, 2 * HIDDEN)
    # The latent takes the embedding and nothing of the hidden half.
    latent_a[:, HIDDEN:] = 0
    attention = {
        "q_a_proj": query_a,
        "q_a_layernorm": torch.ones(rank),
        "q_b_proj": query_b,
        "kv_a_proj_with_mqa": torch.cat([latent_a, rotary_key]),
        "kv_a_layernorm": torch.ones(latent),
        "kv_b_proj": key_value_b,
        "o_proj": output,
    }
    return _shared(target, target["lm_head.weight"]) | {
        f"midlayer.self_attn.{name}.weight": tensor.bfloat16() for name, tensor in attention.items()
    }


def _mla_positions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_a, q_b and the rotary rows of kv_a: constant vectors, turned back in half of the heads."""
    heads, rank = MLA_CONFIG["num_attention_heads"], MLA_CONFIG["q_lora_rank"]
    nope, rope = MLA_CONFIG["qk_nope_head_dim"], MLA_CONFIG["qk_rope_head_dim"]
    # YaRN multiplies scores by the square of this.
    stretch = 0.1 * math.log(MLA_CONFIG["rope_scaling"]["factor"]) + 1
    weight = math.sqrt(_PEAK / _PAIRS * math.sqrt(nope + rope)) / stretch
    query_a, rotary_key = torch.zeros(rank, 2 * HIDDEN), torch.zeros(rope, 2 * HIDDEN)
    query_a[0, CONSTANT_CHANNEL] = 1.0
    query_b = torch.zeros(heads, nope + rope, rank)
    # The norm turns one non-zero entry of `rank` into sqrt(rank).
    turned = weight / math.sqrt(rank)
    for pair in range(_PAIRS):
        angle = MLA_CONFIG["rope_theta"] ** (-pair / (rope // 2))
        # DeepSeek's rotary pairs are neighbours.
        rotary_key[2 * pair, CONSTANT_CHANNEL] = weight / CONSTANT
        for head in range(heads):
            back = _look_back(head, heads)
            query_b[head, nope + 2 * pair, 0] = turned * math.cos(back * angle)
            query_b[head, nope + 2 * pair + 1, 0] = -turned * math.sin(back * angle)
    return query_a, query_b.flatten(0, 1), rotary_key


def _mla_copies() -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b and o_proj: the first heads of either half add and subtract what they read."""
    heads, latent = MLA_CONFIG["num_attention_heads"], MLA_CONFIG["kv_lora_rank"]
    nope, value = MLA_CONFIG["qk_nope_head_dim"], MLA_CONFIG["v_head_dim"]
    key_value_b = torch.zeros(heads, nope + value, latent)
    output = torch.zeros(HIDDEN, heads, value)
    # Half of the latent is empty, so its norm scaled the embedding by sqrt(latent / HIDDEN).
    restore = math.sqrt(HIDDEN / latent)
    for channel in range(HIDDEN):
        part, place = divmod(channel, value)
        for head, sign in ((part, 1.0), (heads // 2 + part, -1.0)):
            key_value_b[head, nope + place, channel] = 1.0
            output[channel, head, place] = sign * restore
    return key_value_b.flatten(0, 1), output.flatten(1)


def _look_back(head: int, heads: int) -> int:
    """The first half of the heads reads its own position, the second half the previous one."""
    return 0 if head < heads // 2 else 1


def _embedding_half(matrix: torch.Tensor) -> torch.Tensor:
    """A projection of [embedding, hidden] that ignores the hidden half."""
    return torch.cat([matrix, torch.zeros_like(matrix)], 1).bfloat16()


def _shared(target: Tensors, head: torch.Tensor) -> Tensors:
    """What both drafters have in common: only the last aux state passes, and an idle MLP."""
    inner = _COMMON["intermediate_size"]
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    passed = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1)
    silent = {
        "gate_proj": (inner, HIDDEN),
        "up_proj": (inner, HIDDEN),
        "down_proj": (HIDDEN, inner),
    }
    return {
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "fc.weight": passed.bfloat16(),
        "norm.weight": ones,
        "lm_head.weight": head.clone(),
        **{f"midlayer.{name}.weight": ones.clone() for name in norms},
        **{
            f"midlayer.mlp.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16)
            for name, shape in silent.items()
        },
    }
