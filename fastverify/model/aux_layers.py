"""Which hidden states of the target an EAGLE-3 drafter is fed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastverify.errors import ConfigError
from fastverify.model.config import Fields, ModelConfig

# Targets whose `set_eagle3_layers_to_capture` in SGLang 0.5.23 adds one to the listed ids only
# when the list starts with 1 (models/deepseek_v2.py, models/glm4_moe_lite.py). Others always do.
SHIFTS_FROM_ONE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "MistralLarge3ForCausalLM",
)


def aux_layers(
    target: ModelConfig, raw: Mapping[str, Any], kind: str, where: str
) -> tuple[int, ...]:
    """Target layers before which SGLang captures hidden states; empty when the drafter uses none.

    raw: the drafter's config.json. kind: "mla" or "mha", which count the states differently.
    Raises ConfigError for ids that are no layers, are captured once but counted twice, or whose
    number is not the one the drafter's `fc` is built for.
    """
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise ConfigError(f"{where} has eagle_config = {eagle!r}, but it must be an object.")
    if not eagle.get("use_aux_hidden_state", True):
        _check_plain(target, raw, where)
        return ()
    stated = _layer_ids(eagle.get("eagle_aux_hidden_state_layer_ids"), where)
    captured = _captured(target, stated)
    _check_range(target, captured, stated, where)
    count = _fc_count(raw, eagle, kind, where)
    if count != len(captured):
        raise ConfigError(
            f"{where} is built for {count} hidden states, but {target.name} would hand over"
            f" {len(captured)} (before layers {_join(captured)}): make"
            " eagle_config.eagle_aux_hidden_state_layer_ids agree with the drafter."
        )
    return captured


def _captured(target: ModelConfig, stated: tuple[int, ...]) -> tuple[int, ...]:
    if not stated:
        return (2, target.layers // 2, target.layers - 3)
    if target.architectures[0] in SHIFTS_FROM_ONE and stated[0] != 1:
        return stated
    if target.architectures[0] == "GptOssForCausalLM" and max(stated) == target.layers:
        return stated
    return tuple(layer + 1 for layer in stated)


def _check_range(
    target: ModelConfig, captured: tuple[int, ...], stated: tuple[int, ...], where: str
) -> None:
    family = target.architectures[0] in SHIFTS_FROM_ONE
    # Some other models also capture behind their last layer.
    last = target.layers - 1 if family else target.layers
    source = f"lists the aux layers {_join(stated)}" if stated else "lists no aux layers"
    outside = [layer for layer in captured if not 0 <= layer <= last]
    if outside:
        raise ConfigError(
            f"{where} {source}, so that SGLang would capture before layer {outside[0]}, but"
            f" {target.name} has {target.layers} layers (0 to {target.layers - 1}): use a drafter"
            " made for this target."
        )
    if len(set(captured)) < len(captured):
        raise ConfigError(
            f"{where} {source}, so that SGLang would capture before layers {_join(captured)}, one"
            f" of them twice, of the {target.layers} of {target.name}: list different layers in"
            " eagle_config.eagle_aux_hidden_state_layer_ids."
        )


def _fc_count(raw: Mapping[str, Any], eagle: Mapping[str, Any], kind: str, where: str) -> int:
    """Hidden states the drafter's `fc` is built for, as each class counts them."""
    nested = _layer_ids(eagle.get("eagle_aux_hidden_state_layer_ids"), where)
    if kind == "mha":
        return Fields(dict(raw), where).whole("num_aux_hidden_states", default=len(nested) or 3)
    return len(nested or _layer_ids(raw.get("eagle_aux_hidden_state_layer_ids"), where)) or 3


def _check_plain(target: ModelConfig, raw: Mapping[str, Any], where: str) -> None:
    hidden = Fields(dict(raw), where).whole("hidden_size")
    if hidden != target.hidden:
        raise ConfigError(
            f"{where} takes the target's last hidden state as it is and has hidden size {hidden},"
            f" but {target.name} has {target.hidden}: use a drafter made for this target."
        )


def _layer_ids(value: Any, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise ConfigError(
            f"{where} has eagle_aux_hidden_state_layer_ids = {value!r}, but it must be a list of"
            " layer numbers."
        )
    return tuple(value)


def _join(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
