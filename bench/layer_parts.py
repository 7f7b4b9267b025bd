"""The parts of one rank's step, each as calls into SGLang's own modules, one call a layer.

Every part runs over all layers, so that its weights come from memory as they do in a step. The
parts of a step are composed once and compared with the model's own forward: a part list that
leaves something out does not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fastverify.errors import FastverifyError

Call = Callable[[], Any]

# In the order of a step. `input_norm` and `attn_norm` are add + RMSNorm: where ranks exist, the
# all-reduce of the previous FFN and of the attention completes just before them.
LAYER_PARTS = ("input_norm", "qkv_proj", "attention", "out_proj", "attn_norm")
MOE_PARTS = ("router", "experts", "shared_expert", "moe_add")
STEP_PARTS = ("embedding", "head")
DENSE_PART = "dense_mlp"
# The whole MoE block as captured: SGLang runs the shared expert on a second stream.
MOE_BLOCK = "moe_block"
OVERLAP = "moe_overlap"
UNATTRIBUTED = "unattributed"
PART_NAMES = (*LAYER_PARTS, *MOE_PARTS, OVERLAP, DENSE_PART, *STEP_PARTS, UNATTRIBUTED)


class Taken(NamedTuple):
    """What one layer's parts read, as the composed step met it."""

    hidden: torch.Tensor
    residual: torch.Tensor
    normed: torch.Tensor
    prepared: Any
    attended: torch.Tensor
    projected: torch.Tensor
    ffn_input: torch.Tensor
    topk: Any
    routed: torch.Tensor | None
    shared: torch.Tensor | None


def prepare_qkv(layer: Any, normed: torch.Tensor, batch: Any) -> Any:
    """Latent and query projections, their norms, rope and the absorbed K product."""
    from sglang.srt.layers.layer_boundary import get_attn_tp_context
    from sglang.srt.layers.layer_boundary.adapters.attention import AttentionInputs

    attention = layer.self_attn
    context = get_attn_tp_context()
    context.set_attn_inputs(AttentionInputs(normed, batch, attention.prepare_qkv_latent))
    _, method, _, prepared = attention.forward_prepare(batch.positions, normed, batch, None)
    context.clear_attn_inputs()
    if method.name != "MLA":
        raise FastverifyError(f"attention runs as {method.name}; the bench splits absorbed MLA.")
    return prepared


def attend(layer: Any, prepared: Any, batch: Any) -> torch.Tensor:
    """Write the new latents and attend; returns (rows, heads, kv_lora_rank)."""
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    attention = layer.self_attn
    q_pe, k_pe, q_nope, k_nope = prepared[:4]
    if attention.current_attention_backend in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        out = attention.attn_mqa(q_nope, k_nope, k_nope, batch, q_rope=q_pe, k_rope=k_pe)
    else:
        query = torch.cat([q_nope, q_pe], dim=-1)
        key = torch.cat([k_nope, k_pe], dim=-1)
        out = attention.attn_mqa(query, key, k_nope, batch, save_kv_cache=True)
    return out.view(-1, attention.num_local_heads, attention.kv_lora_rank)


def project_out(layer: Any, attended: torch.Tensor) -> torch.Tensor:
    """The absorbed V product and the output projection."""
    attention = layer.self_attn
    rows, heads = attended.shape[0], attention.num_local_heads
    values = attended.new_empty((rows, heads * attention.v_head_dim))
    by_head = values.view(rows, heads, attention.v_head_dim).transpose(0, 1)
    torch.bmm(attended.transpose(0, 1), attention.w_vc, out=by_head)
    return attention.o_proj(values)[0]


def route(layer: Any, ffn_input: torch.Tensor) -> Any:
    """Router logits and the chosen experts."""
    return layer.mlp.topk(ffn_input, layer.mlp.gate(ffn_input, None))


def run_experts(layer: Any, ffn_input: torch.Tensor, topk: Any) -> torch.Tensor:
    """Routed experts. Some runners write their output over ffn_input."""
    from sglang.srt.utils import is_cuda

    out = layer.mlp.experts(ffn_input, topk)
    if not is_cuda():
        out *= layer.mlp.routed_scaling_factor
    return out


def add_shared(layer: Any, routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Add the shared expert's output to the routed sum, as the model does."""
    from sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe import (
        maybe_fuse_routed_scale_and_shared_add,
    )

    factor = layer.mlp.routed_scaling_factor
    return maybe_fuse_routed_scale_and_shared_add(layer.mlp.experts, routed, shared, factor)


def expert_runner(model: Any) -> str:
    """Class of the routed experts' quantization scheme, which names the kernel family."""
    experts = next(layer.mlp.experts for layer in model.model.layers if is_moe(layer))
    return type(getattr(experts, "scheme", None) or experts.quant_method).__name__


def is_moe(layer: Any) -> bool:
    """Whether the layer's FFN is a mixture of experts."""
    return hasattr(layer.mlp, "experts")


def run_layer(layer: Any, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Any) -> Any:
    """Compose one layer from its parts: (FFN output, residual, Taken)."""
    if residual is None:
        residual = hidden.clone()
        normed = layer.input_layernorm(hidden)
        before = (hidden, torch.zeros_like(hidden))
    else:
        before = (hidden.clone(), residual.clone())
        normed, residual = layer.input_layernorm(hidden, residual)
    prepared = prepare_qkv(layer, normed, batch)
    attended = attend(layer, prepared, batch)
    projected = project_out(layer, attended)
    kept = projected.clone()
    ffn_input, residual = layer.post_attention_layernorm(projected, residual)
    if not is_moe(layer):
        taken = Taken(*before, normed, prepared, attended, kept, ffn_input, None, None, None)
        return layer.mlp(ffn_input, batch), residual, taken
    topk = route(layer, ffn_input)
    shared = layer.mlp._forward_shared_experts(ffn_input)
    routed = run_experts(layer, ffn_input.clone(), topk)
    taken = Taken(
        *before, normed, prepared, attended, kept, ffn_input, topk, routed.clone(), shared.clone()
    )
    return add_shared(layer, routed, shared), residual, taken


def run_head(model: Any, hidden: torch.Tensor, residual: torch.Tensor, batch: Any) -> torch.Tensor:
    """Final norm and logits of every row."""
    normed, _ = model.model.norm(hidden, residual)
    out = model.logits_processor(batch.input_ids, normed, model.lm_head, batch, None)
    return out.next_token_logits


class ComposedStep(NamedTuple):
    """A step run from its parts. output: the last layer's FFN output and residual."""

    logits: torch.Tensor
    layers: list[Taken]
    hidden: torch.Tensor
    residual: torch.Tensor


def run_composed(model: Any, batch: Any) -> ComposedStep:
    """The whole step from its parts, keeping what each part read."""
    hidden, residual = model.model.embed_tokens(batch.input_ids), None
    taken = []
    for layer in model.model.layers:
        hidden, residual, kept = run_layer(layer, hidden, residual, batch)
        taken.append(kept)
    logits = run_head(model, hidden.clone(), residual.clone(), batch)
    return ComposedStep(logits, taken, hidden, residual)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; NaN stays NaN."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm())


def distinct_experts(taken: list[Taken]) -> float:
    """Mean number of different experts that one MoE layer touched."""
    counts = [t.topk.topk_ids.unique().numel() for t in taken if t.topk is not None]
    return sum(counts) / len(counts)


def rotating_parts(model: Any, step: ComposedStep, batch: Any) -> dict[str, list[Call]]:
    """Per part, one call a layer that has it, each over that layer's own weights and inputs.

    Calls that write over their input (norms, the add, some expert runners) own a copy of it.
    """
    pairs = list(zip(model.model.layers, step.layers, strict=True))
    dense = [(layer, t) for layer, t in pairs if not is_moe(layer)]
    end = (step.hidden.clone(), step.residual.clone())
    return {
        "input_norm": [
            partial(layer.input_layernorm, t.hidden.clone(), t.residual.clone())
            for layer, t in pairs
        ],
        "qkv_proj": [partial(prepare_qkv, layer, t.normed, batch) for layer, t in pairs],
        "attention": attention_calls(model, step, batch),
        "out_proj": [partial(project_out, layer, t.attended) for layer, t in pairs],
        "attn_norm": [
            partial(layer.post_attention_layernorm, t.projected.clone(), t.residual.clone())
            for layer, t in pairs
        ],
        **moe_parts([(layer, t) for layer, t in pairs if is_moe(layer)], batch),
        DENSE_PART: [partial(layer.mlp, t.ffn_input, batch) for layer, t in dense],
        "embedding": [partial(model.model.embed_tokens, batch.input_ids)],
        "head": [partial(run_head, model, *end, batch)],
    }


def moe_parts(moe: list[tuple[Any, Taken]], batch: Any) -> dict[str, list[Call]]:
    """The parts of the MoE block one by one, and the block as SGLang runs it."""
    return {
        "router": [partial(route, layer, t.ffn_input) for layer, t in moe],
        "experts": [partial(run_experts, layer, t.ffn_input.clone(), t.topk) for layer, t in moe],
        "shared_expert": [
            partial(layer.mlp._forward_shared_experts, t.ffn_input) for layer, t in moe
        ],
        "moe_add": [partial(add_shared, layer, t.routed.clone(), t.shared) for layer, t in moe],
        MOE_BLOCK: [partial(layer.mlp, t.ffn_input.clone(), batch) for layer, t in moe],
    }


def attention_calls(model: Any, step: ComposedStep, batch: Any) -> list[Call]:
    """The attention part alone: the only one that depends on context and backend."""
    pairs = zip(model.model.layers, step.layers, strict=True)
    return [partial(attend, layer, t.prepared, batch) for layer, t in pairs]
