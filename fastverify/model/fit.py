"""Does a model divide over so many GPUs, and do its weights fit. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from fastverify.errors import ConfigError

if TYPE_CHECKING:
    from fastverify.model.config import ModelConfig, Quantization

LARGEST_TP = 64
# SGLang 0.5.23, layers/quantization/marlin_utils.py: 4- and 8-bit integer experts run on Marlin.
MARLIN_HIDDEN = 128
MARLIN_MIN_WIDTH = 64


class Weights(msgspec.Struct, frozen=True):
    """A group of equal matrices. module: a representative name; replicated: whole on each rank."""

    module: str
    count: int
    replicated: bool = False
    quantizable: bool = True


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuse a tensor-parallel size that SGLang 0.5.23 cannot split this model into.

    Raises ConfigError with the number that does not divide and the sizes that are possible.
    """
    problem = tp_problem(config, tp)
    if problem is None:
        return
    possible = [n for n in range(1, LARGEST_TP + 1) if tp_problem(config, n) is None]
    remedy = (
        f"--tp-size may be {', '.join(map(str, possible))}"
        if possible
        else "no --tp-size is possible for this checkpoint"
    )
    raise ConfigError(f"{config.name} cannot run at --tp-size {tp}: {problem}; {remedy}.")


def tp_problem(config: ModelConfig, tp: int) -> str | None:
    """Why a tensor-parallel size is impossible, None when it is possible."""
    if tp < 1:
        return "it must be at least 1"
    if config.heads % tp:
        return f"its {config.heads} attention heads do not divide by {tp}"
    kv_heads = config.kv_heads
    if not config.is_mla and max(kv_heads, tp) % min(kv_heads, tp):
        return f"its {kv_heads} key-value heads neither divide by {tp} nor divide it"
    dense = config.first_dense > 0 or not config.experts
    widths = [("feed-forward", config.intermediate)] if dense else []
    if config.experts:
        widths.append(("expert", config.moe_intermediate))
    for what, width in widths:
        if width % tp:
            return f"its {what} width {width} does not divide by {tp}"
    return _quantized_problem(config, tp)


def _quantized_problem(config: ModelConfig, tp: int) -> str | None:
    quantization = config.quantization
    if quantization is None or not config.experts or is_ignored(quantization, _expert(config)):
        return None
    width = config.moe_intermediate // tp
    if quantization.is_float:
        # FP8 blocks must not straddle ranks (layers/quantization/fp8.py).
        if quantization.bits == 8 and quantization.group > 0 and width % quantization.group:
            return (
                f"{width} expert columns a GPU do not divide by its FP8 block {quantization.group}"
            )
        return None
    if quantization.bits >= 16:
        return None
    if config.hidden % MARLIN_HIDDEN:
        return f"Marlin needs a hidden size that divides by {MARLIN_HIDDEN}, not {config.hidden}"
    step = max(MARLIN_MIN_WIDTH, quantization.group)
    if width % step:
        return f"Marlin needs expert columns a GPU that divide by {step}, not {width}"
    return None


def weights_fit(config: ModelConfig, memory_bytes: Sequence[int], gpus: int) -> int:
    """Bytes of weights on each GPU when `gpus` of them share the model.

    memory_bytes: total memory of each GPU that would be used. Says nothing about KV cache and
    graphs. Raises ConfigError when there are too few GPUs or the weights alone overfill one.
    """
    if len(memory_bytes) < gpus:
        raise ConfigError(
            f"{config.name} asks for {gpus} GPUs and this machine has {len(memory_bytes)}: lower"
            " --tp-size or use another machine."
        )
    replicated = sum(_bytes(config, part) for part in _matrices(config) if part.replicated)
    replicated = min(replicated, config.weight_bytes)
    share = replicated + -(-(config.weight_bytes - replicated) // gpus)
    smallest = min(memory_bytes[:gpus])
    if share > smallest:
        source = "" if config.weights_on_disk else "about "
        raise ConfigError(
            f"{config.name} puts {source}{share / 1e9:.1f} GB of weights on each of {gpus} GPUs,"
            f" and the smallest has {smallest / 1e9:.1f} GB: use more GPUs or fewer bits a weight."
        )
    return share


def estimate_weight_bytes(config: ModelConfig) -> int:
    """Size of the text model's weights, computed from its shape and quantisation.

    Leaves out what is small or absent while serving: norms, vision towers, sparse indexers,
    next-token prediction layers.
    """
    return sum(_bytes(config, part) for part in _matrices(config))


def _bytes(config: ModelConfig, part: Weights) -> int:
    bits = 32.0 if config.dtype in ("float32", "float") else 16.0
    quantization = config.quantization
    if quantization and part.quantizable and not is_ignored(quantization, part.module):
        bits = float(quantization.bits)
        if quantization.group > 0 and bits == 4:
            bits += (8 if quantization.is_float else 16) / quantization.group
    return int(part.count * bits / 8)


def is_ignored(quantization: Quantization, module: str) -> bool:
    """True when a module stays unquantised: `re:` patterns, `*` wildcards, or part of its name."""
    for pattern in quantization.ignored:
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], module):
                    return True
            except re.error:
                continue
        elif "*" in pattern:
            if fnmatch.fnmatchcase(module, pattern):
                return True
        elif pattern in module:
            return True
    return False


def _matrices(config: ModelConfig) -> Iterator[Weights]:
    hidden, layers = config.hidden, config.layers
    yield Weights("model.embed_tokens", config.vocab * hidden, quantizable=False)
    if not config.tied_embeddings:
        yield Weights("lm_head", config.vocab * hidden, quantizable=False)
    last = f"model.layers.{layers - 1}"
    yield from _attention(config, f"{last}.self_attn")
    sparse = max(0, layers - config.first_dense) if config.experts else 0
    yield Weights(
        "model.layers.0.mlp.gate_proj", (layers - sparse) * 3 * hidden * config.intermediate
    )
    expert = 3 * hidden * config.moe_intermediate * sparse
    yield Weights(_expert(config), expert * config.experts)
    yield Weights(f"{last}.mlp.shared_experts.gate_proj", expert * config.shared_experts)
    router = sparse * hidden * config.experts
    yield Weights(f"{last}.mlp.gate", router, replicated=True, quantizable=False)


def _expert(config: ModelConfig) -> str:
    return f"model.layers.{config.layers - 1}.mlp.experts.0.gate_proj"


def _attention(config: ModelConfig, prefix: str) -> Iterator[Weights]:
    hidden, heads, layers = config.hidden, config.heads, config.layers
    if not config.is_mla:
        width = config.head_dim * (2 * heads + 2 * config.kv_heads)
        yield Weights(f"{prefix}.q_proj", layers * hidden * width)
        return
    latent = config.kv_lora_rank + config.qk_rope
    query = heads * (config.qk_nope + config.qk_rope)
    yield Weights(f"{prefix}.kv_a_proj_with_mqa", layers * hidden * latent, replicated=True)
    if config.q_lora_rank:
        yield Weights(f"{prefix}.q_a_proj", layers * hidden * config.q_lora_rank, replicated=True)
    yield Weights(f"{prefix}.q_b_proj", layers * (config.q_lora_rank or hidden) * query)
    values = heads * (config.qk_nope + config.v_head)
    yield Weights(f"{prefix}.kv_b_proj", layers * config.kv_lora_rank * values)
    yield Weights(f"{prefix}.o_proj", layers * heads * config.v_head * hidden)
