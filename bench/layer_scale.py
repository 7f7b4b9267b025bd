"""One rank's measured parts on a GPU of another memory bandwidth; pure functions."""

from __future__ import annotations

import msgspec

from bench import shapes

MOE = ("router", "experts", "shared_expert", "moe_add", "moe_overlap")
NORMS = ("input_norm", "attn_norm")


class Compute(msgspec.Struct, frozen=True):
    """Time of a step of one rank without its collectives, in ms.

    norms_ms: add-norm time that a fused collective takes over. kind: where the number is from.
    """

    ms: float
    norms_ms: float
    kind: str


def part_bytes(
    shape: shapes.Shape, tp: int, *, context: int, batch: int, experts: float
) -> dict[str, float]:
    """Bytes of weights and KV that one call of each part must read, for one rank of TP=tp.

    experts: distinct experts a layer touches. Parts that read activations only are left out:
    their time is latency, whatever the memory.
    """
    heads = shape.num_attention_heads // tp
    latent = shape.kv_lora_rank + shape.qk_rope_head_dim
    query = shape.q_lora_rank * heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size // tp
    per_weight = 0.5 + 2 / shapes.GROUP if shape.int4 else 2.0
    return {
        "qkv_proj": 2.0
        * (
            shape.hidden_size * (shape.q_lora_rank + latent)
            + query
            + heads * shape.qk_nope_head_dim * shape.kv_lora_rank
        ),
        "attention": 2.0 * batch * context * latent,
        "out_proj": 2.0 * heads * shape.v_head_dim * (shape.kv_lora_rank + shape.hidden_size),
        "router": 2.0 * shape.hidden_size * shape.n_routed_experts,
        "experts": experts * expert * per_weight,
        "shared_expert": 2.0 * expert,
        "dense_mlp": 2.0 * 3 * shape.hidden_size * shape.intermediate_size // tp,
        "head": 2.0 * shape.hidden_size * shape.vocab_size / tp,
    }


def stretch_us(measured_us: float, read_bytes: float, source_tb_s: float, tb_s: float) -> float:
    """Time on a GPU of another memory bandwidth: the share that reads memory stretches.

    The share is what the bytes take at the source's full bandwidth, at most the whole; latency
    and arithmetic stay as they were measured.
    """
    memory_us = min(measured_us, read_bytes / (source_tb_s * 1e6))
    return measured_us - memory_us + memory_us * source_tb_s / tb_s


def measured_compute(
    parts_us: dict[str, float],
    reads: dict[str, float],
    *,
    layers: int,
    dense: int,
    source_tb_s: float,
    tb_s: float,
) -> Compute:
    """One rank's step without collectives from its measured parts, at another bandwidth.

    The MoE parts stretch together, as the block runs them on two streams.
    """

    def moved(names: tuple[str, ...]) -> float:
        total = sum(parts_us[name] for name in names)
        return stretch_us(total, sum(reads.get(n, 0.0) for n in names), source_tb_s, tb_s)

    per_layer = sum(moved((n,)) for n in ("qkv_proj", "attention", "out_proj", "unattributed"))
    norms = layers * sum(parts_us[name] for name in NORMS)
    whole = layers * per_layer + (layers - dense) * moved(MOE)
    whole += dense * moved(("dense_mlp",)) if dense else 0.0
    whole += moved(("embedding",)) + moved(("head",)) + norms
    kind = "measured" if source_tb_s == tb_s else "scaled"
    return Compute(whole / 1000, norms / 1000, kind)
