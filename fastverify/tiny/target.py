"""The target: a random DeepSeek-V3 whose greedy text depends on its whole context.

The residual stream carries the embedding of the current token, and the layers add a context to
it. Embedding rows have unit RMS and one constant channel that no layer writes to: the drafter
finds positions with it, and the output head uses it to keep to whole words.
"""

from __future__ import annotations

import torch

from fastverify.tiny.config import CONFIG, HIDDEN, LAYERS, VOCAB
from fastverify.tiny.tokenizer import vocabulary

CONSTANT_CHANNEL, CONSTANT = 0, 3.0
SEED = 4

# How the layers mix, found by trial. Attention adds a context that moves slowly, like a window
# over the last words; QUERY and MLP_OUT make it move faster and LATE scales the layers that come
# after the last one a drafter sees: more of these three costs acceptance.
QUERY, ATTENTION_OUT, MLP_OUT, LATE, HEAD = 0.1, 0.8, 0.04, 0.05, 0.08
FIRST_LATE_LAYER = LAYERS - 3
# Rotary pairs with periods of 24 to 67 positions, and the weight that lets them shape the window.
WINDOW_PAIRS, WINDOW = range(4, 8), 0.7
# The first layer also subtracts a copy of the last words, moved by SHIFT channels, which the head's
# row of the same word resembles by ALIKE: a word just said becomes unlikely, so nothing loops.
SHIFT, ALIKE, REPEL = 100, 0.7, 2.0
# Large enough that no other token is ever the best, small enough for bf16.
WORDS_ONLY = -16.0

Tensors = dict[str, torch.Tensor]


class Source:
    """Random weights that are equal on every machine: integers from one seeded stream, scaled."""

    def __init__(self, seed: int) -> None:
        self._stream = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int, std: float) -> torch.Tensor:
        """Symmetric weights of the given standard deviation, bf16."""
        steps = torch.randint(-127, 128, shape, generator=self._stream, dtype=torch.int16)
        return (steps.float() * (std * 3**0.5 / 127)).bfloat16()

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """Weights that give unit-RMS inputs outputs of RMS `gain`."""
        return self.uniform(rows, columns, std=gain / columns**0.5)


def target_tensors() -> Tensors:
    """Every weight under its Hugging Face name; bf16, so fp32 and bf16 runs read the same model."""
    source = Source(SEED)
    tensors = {
        "model.embed_tokens.weight": _embedding(source),
        "model.norm.weight": _ones(HIDDEN),
    }
    tensors["lm_head.weight"] = _head(source, tensors["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        scale = LATE if layer >= FIRST_LATE_LAYER else 1.0
        parts = _attention(source, ATTENTION_OUT * scale)
        if layer == 0:
            _repel_recent(parts)
        parts |= _feed_forward(source, layer, MLP_OUT * scale)
        tensors |= {prefix + name: tensor for name, tensor in parts.items()}
    return tensors


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _embedding(source: Source) -> torch.Tensor:
    rows = source.uniform(VOCAB, HIDDEN, std=1.0).float()
    rows[:, CONSTANT_CHANNEL] = 0
    rows *= ((HIDDEN - CONSTANT**2) / rows.square().sum(1, keepdim=True)).sqrt()
    rows[:, CONSTANT_CHANNEL] = CONSTANT
    return rows.bfloat16()


def _head(source: Source, embedding: torch.Tensor) -> torch.Tensor:
    free = source.uniform(VOCAB, HIDDEN, std=HEAD * (1 - ALIKE**2) ** 0.5)
    head = (free.float() + HEAD * ALIKE * embedding.float().roll(SHIFT, 1)).bfloat16()
    words = torch.tensor(sorted(vocabulary()[1]))
    head[:, CONSTANT_CHANNEL] = WORDS_ONLY
    head[words, CONSTANT_CHANNEL] = 0
    return head


def _writes(matrix: torch.Tensor) -> torch.Tensor:
    """A projection into the residual stream: leaves the constant channel alone."""
    matrix[CONSTANT_CHANNEL] = 0
    return matrix


def _attention(source: Source, out: float) -> Tensors:
    heads, queries, latent = (
        CONFIG[name] for name in ("num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (
        CONFIG[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_a = source.matrix(queries, HIDDEN)
    q_b = source.matrix(heads * (nope + rope), queries, QUERY)
    kv_a = source.matrix(latent + rope, HIDDEN)
    _favour_recent(q_a, q_b.view(heads, nope + rope, queries)[:, nope:], kv_a[latent:])
    return {
        "input_layernorm.weight": _ones(HIDDEN),
        "post_attention_layernorm.weight": _ones(HIDDEN),
        "self_attn.q_a_proj.weight": q_a,
        "self_attn.q_a_layernorm.weight": _ones(queries),
        "self_attn.q_b_proj.weight": q_b,
        "self_attn.kv_a_proj_with_mqa.weight": kv_a,
        "self_attn.kv_a_layernorm.weight": _ones(latent),
        "self_attn.kv_b_proj.weight": source.matrix(heads * (nope + value), latent),
        "self_attn.o_proj.weight": _writes(source.matrix(HIDDEN, heads * value, out)),
    }


def _favour_recent(q_a: torch.Tensor, q_rope: torch.Tensor, k_rope: torch.Tensor) -> None:
    """Give some rotary pairs a constant query and key, so that scores fall with distance."""
    q_a[0] = 0
    q_a[0, CONSTANT_CHANNEL] = 1
    for pair in WINDOW_PAIRS:
        # DeepSeek's rotary pairs are neighbours.
        row = 2 * pair
        k_rope[row : row + 2] = 0
        k_rope[row, CONSTANT_CHANNEL] = WINDOW
        q_rope[:, row : row + 2] = 0
        q_rope[:, row, 0] = WINDOW


def _repel_recent(attention: Tensors) -> None:
    """Make the first heads copy their input, negated and moved, instead of mixing it."""
    nope, value = CONFIG["qk_nope_head_dim"], CONFIG["v_head_dim"]
    attention["self_attn.kv_a_proj_with_mqa.weight"][:HIDDEN] = torch.eye(HIDDEN)
    up, out = (attention[f"self_attn.{name}.weight"] for name in ("kv_b_proj", "o_proj"))
    for channel in range(HIDDEN):
        head, part = divmod(channel, value)
        row = head * (nope + value) + nope + part
        up[row] = 0
        up[row, channel] = 1
        out[:, channel] = 0
        if channel != CONSTANT_CHANNEL:
            out[(channel + SHIFT) % HIDDEN, channel] = -REPEL
    _writes(out)


def _feed_forward(source: Source, layer: int, out: float) -> Tensors:
    if layer < CONFIG["first_k_dense_replace"]:
        return _gated("mlp.", source, CONFIG["intermediate_size"], out)
    experts, inner = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
    tensors = {
        "mlp.gate.weight": source.matrix(experts, HIDDEN),
        "mlp.gate.e_score_correction_bias": source.uniform(experts, std=0.1).float(),
    }
    for expert in range(experts):
        tensors |= _gated(f"mlp.experts.{expert}.", source, inner, out)
    return tensors | _gated("mlp.shared_experts.", source, inner, out)


def _gated(prefix: str, source: Source, inner: int, gain: float) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": source.matrix(inner, HIDDEN),
        f"{prefix}up_proj.weight": source.matrix(inner, HIDDEN),
        f"{prefix}down_proj.weight": _writes(source.matrix(HIDDEN, inner, gain)),
    }
