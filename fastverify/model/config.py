"""A model's shape as its config.json states it."""

from __future__ import annotations

from typing import Any

import msgspec

from fastverify.errors import ConfigError
from fastverify.model.files import ModelFiles, disk_bytes, pickled_weights, read_json, weight_files
from fastverify.model.fit import check_tp, estimate_weight_bytes, weights_fit

__all__ = [
    "ModelConfig",
    "Quantization",
    "check_tp",
    "estimate_weight_bytes",
    "load_model_config",
    "model_config",
    "weights_fit",
]

UNQUANTIZED_BITS = 16
BITS_BY_NAME = {
    "nvfp4": 4,
    "fp4": 4,
    "mxfp4": 4,
    "int4": 4,
    "awq": 4,
    "fp8": 8,
    "int8": 8,
    "w8a8": 8,
}


class Quantization(msgspec.Struct, frozen=True):
    """How weights are stored.

    bits: 16 when the method is unknown to us. group: weights that share a scale along the input,
    -1 for one scale a row. ignored: module names and patterns that stay unquantised.
    """

    method: str
    bits: int
    group: int
    is_float: bool
    ignored: tuple[str, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True):
    """Shape of the text model; fields that an architecture lacks are 0 (None for max_context).

    weight_bytes: size on disk when the weights are there, else an estimate (weights_on_disk).
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_experts: int = 0
    first_dense: int = 0
    quantization: Quantization | None = None
    dtype: str = "bfloat16"
    max_context: int | None = None
    rope: str = "default"
    tied_embeddings: bool = False
    weight_bytes: int = 0
    weights_on_disk: bool = False

    @property
    def is_mla(self) -> bool:
        """Multi-head latent attention: one compressed key-value entry a token."""
        return self.kv_lora_rank > 0


def load_model_config(
    files: ModelFiles, *, what: str = "model", dummy_weights: bool = False
) -> ModelConfig | None:
    """Shape of a resolved model, None when it is not on this disk (source "hub").

    dummy_weights: SGLang will make them up, so that none are looked for.
    Raises ConfigError for a bad config.json and for missing or damaged weight files.
    """
    if files.config is None or files.folder is None:
        return None
    raw = files.config
    modelopt = files.folder / "hf_quant_config.json"
    if "quantization_config" not in raw and modelopt.exists():
        stated = read_json(modelopt, what).get("quantization")
        raw = {**raw, "quantization_config": {"quant_method": "modelopt", **(stated or {})}}
    size = None
    if not dummy_weights:
        size = disk_bytes(files, what)
        found = weight_files(files, what) or pickled_weights(files)
        if files.source == "folder" and not found:
            raise ConfigError(
                f"{what} {files.name} has a config.json and no weight files (*.safetensors or"
                " *.bin): complete the download, or pass --load-format dummy for random weights."
            )
    return model_config(raw, files.name, disk_size=size)


def model_config(raw: dict[str, Any], where: str, *, disk_size: int | None = None) -> ModelConfig:
    """Read the fields of a config.json. where: what messages call it, also the result's name.

    Models that wrap a text model (Kimi-K2.5) keep its fields in `text_config`.
    Raises ConfigError naming the field, its value and what it must be.
    """
    text = raw.get("text_config")
    if "hidden_size" in raw or not isinstance(text, dict):
        text = raw
    fields = Fields(text, where)
    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    config = ModelConfig(
        name=where,
        architectures=Fields(raw, where).names("architectures"),
        model_type=str(raw.get("model_type", "")),
        hidden=hidden,
        layers=fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", default=heads),
        head_dim=fields.whole("head_dim", default=max(1, hidden // heads)),
        vocab=fields.whole("vocab_size"),
        intermediate=fields.whole("intermediate_size"),
        **_mla(fields),
        **_experts(fields),
        quantization=_quantization({**text, **raw}, where),
        dtype=str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"),
        max_context=fields.whole("max_position_embeddings", default=0) or None,
        rope=_rope(text),
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
    )
    size = disk_size if disk_size is not None else estimate_weight_bytes(config)
    return msgspec.structs.replace(config, weight_bytes=size, weights_on_disk=disk_size is not None)


class Fields:
    """Typed reading of a config.json; null counts as absent, as in SGLang."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of `names` that is there; required without default."""
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{self._where}: config.json has {name} = {value!r}, but it must be a whole"
                    f" number from {least} up."
                )
            return value
        if default is None:
            raise ConfigError(
                f"{self._where}: config.json lacks {names[0]}, without which the model's shape is"
                " unknown: give the complete config.json."
            )
        return default

    def names(self, name: str) -> tuple[str, ...]:
        """A required, non-empty list of strings."""
        value = self._raw.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise ConfigError(
                f"{self._where}: config.json has {name} = {value!r}, but it must be a list with at"
                " least one name."
            )
        return tuple(value)


def _mla(fields: Fields) -> dict[str, Any]:
    rank = fields.whole("kv_lora_rank", default=0, least=0)
    if not rank:
        return {}
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": fields.whole("q_lora_rank", default=0, least=0),
        "qk_nope": fields.whole("qk_nope_head_dim"),
        "qk_rope": fields.whole("qk_rope_head_dim", least=0),
        "v_head": fields.whole("v_head_dim"),
    }


def _experts(fields: Fields) -> dict[str, Any]:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = fields.whole(*names, default=0, least=0)
    if not experts:
        return {}
    return {
        "experts": experts,
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "moe_intermediate": fields.whole("moe_intermediate_size", "intermediate_size"),
        "shared_experts": fields.whole("n_shared_experts", default=0, least=0),
        "first_dense": fields.whole("first_k_dense_replace", default=0, least=0),
    }


def _rope(text: dict[str, Any]) -> str:
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, dict):
        return "default"
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _quantization(raw: dict[str, Any], where: str) -> Quantization | None:
    stated = raw.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise ConfigError(
            f"{where}: config.json has quantization_config = {stated!r}, but it must be an object."
        )
    groups = stated.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    fields = Fields({**stated, **(weights if isinstance(weights, dict) else {})}, where)
    method = str(stated.get("quant_method") or "unknown")
    name = f"{method} {stated.get('quant_algo') or ''} {stated.get('format') or ''}".lower()
    by_name = next((bits for key, bits in BITS_BY_NAME.items() if key in name), UNQUANTIZED_BITS)
    block = stated.get("weight_block_size")
    by_format = 16 if "nvfp4" in name else 32 if "mxfp4" in name else -1
    group = block[-1] if isinstance(block, list) and block else by_format
    is_float = weights.get("type") == "float" if isinstance(weights, dict) else "fp" in name
    keys = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
    ignored: list[Any] = next(
        (stated[key] for key in keys if isinstance(stated.get(key), list)), []
    )
    return Quantization(
        method=method,
        bits=fields.whole("num_bits", "bits", "w_bit", default=by_name),
        group=fields.whole("group_size", "q_group_size", default=group, least=-1),
        is_float=is_float,
        ignored=tuple(map(str, ignored)),
    )
