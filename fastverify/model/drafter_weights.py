"""A drafter's safetensors headers and vocabulary map against the shape SGLang will build.

SGLang 0.5.23 leaves a weight that the checkpoint lacks as it was allocated and skips one whose
name it does not know, without an error: what is missing must be found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from fastverify.errors import ConfigError
from fastverify.model.config import ModelConfig
from fastverify.model.files import Tensor, load_map
from fastverify.model.vocab_map import check_map

Kind = Literal["mla", "mha"]
FLOATS = ("BF16", "F16", "F32")


class DraftShape(msgspec.Struct, frozen=True):
    """What the weights must agree with. aux_count 0: no `fc` is used."""

    target: ModelConfig
    config: ModelConfig
    kind: Kind
    aux_count: int
    draft_vocab: int
    own_head: bool


def check_weights(tensors: Mapping[str, Tensor], shape: DraftShape) -> list[str]:
    """Refuse absent or wrongly shaped tensors and a wrong vocabulary map; returns warnings."""
    _check_shapes(tensors, shape)
    _check_layers(tensors, shape)
    return [*_check_vocab_map(tensors, shape), *_dtype_warnings(tensors, shape.config)]


def _expected(shape: DraftShape) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Tensor name -> the shape SGLang loads it into, and whether it must be there."""
    hidden, target_hidden = shape.config.hidden, shape.target.hidden
    expected = {
        "norm.weight": ((hidden,), True),
        "lm_head.weight": ((shape.draft_vocab, hidden), shape.own_head),
        # At equal widths SGLang puts the target's embedding in place of the drafter's.
        "embed_tokens.weight": ((shape.config.vocab, hidden), hidden != target_hidden),
    }
    if shape.aux_count:
        expected["fc.weight"] = ((hidden, shape.aux_count * target_hidden), True)
    return expected


def _check_shapes(tensors: Mapping[str, Tensor], shape: DraftShape) -> None:
    where = shape.config.name
    for name, (wanted, required) in _expected(shape).items():
        found = _find(tensors, name, shape.kind)
        if found is None and required and not _is_packed(tensors, name):
            raise ConfigError(
                f"{where} has no tensor {name} of shape {list(wanted)}, and SGLang would draft with"
                " random numbers in its place: export or download the drafter again."
            )
        if found is not None and found.shape != wanted:
            raise ConfigError(
                f"{where} has {name} of shape {list(found.shape)}, but with this target it must be"
                f" {list(wanted)}: use a drafter made for {shape.target.name}."
            )


def _find(tensors: Mapping[str, Tensor], name: str, kind: Kind) -> Tensor | None:
    """A tensor under the names SGLang takes it by: only the Llama class knows `model.` in front."""
    found = tensors.get(name)
    return tensors.get(f"model.{name}") if found is None and kind == "mha" else found


def _is_packed(tensors: Mapping[str, Tensor], name: str) -> bool:
    """True for a quantised matrix, stored under weight_packed and the like."""
    return any(found.removeprefix("model.").startswith(f"{name}_") for found in tensors)


def _check_layers(tensors: Mapping[str, Tensor], shape: DraftShape) -> None:
    for layer in range(shape.config.layers):
        prefixes = [f"layers.{layer}."] + (["midlayer."] if layer == 0 else [])
        if shape.kind == "mha":
            prefixes += [f"model.{prefix}" for prefix in prefixes]
        if not any(name.startswith(tuple(prefixes)) for name in tensors):
            names = " or ".join(f"{prefix}*" for prefix in prefixes)
            raise ConfigError(
                f"{shape.config.name} has no tensors of decoder layer {layer} ({names}), and SGLang"
                " would draft with random numbers in its place: export or download it again."
            )
    for name, tensor in tensors.items():
        if shape.kind == "mla" and name.endswith("kv_b_proj.weight") and tensor.dtype not in FLOATS:
            raise ConfigError(
                f"{shape.config.name} stores {name} as {tensor.dtype}, but SGLang 0.5.23 serves MLA"
                f" drafters only in {', '.join(FLOATS)}: use an unquantised drafter."
            )


def _check_vocab_map(tensors: Mapping[str, Tensor], shape: DraftShape) -> tuple[str, ...]:
    where, vocab = shape.config.name, shape.target.vocab
    loaded = {}
    for name in ("d2t", "t2d"):
        key = next((k for k in tensors if k == name or k.endswith(f".{name}")), None)
        loaded[name] = None if key is None else load_map(tensors[key], key, "draft")
    if loaded["d2t"] is None:
        if shape.draft_vocab == vocab:
            return ()
        raise ConfigError(
            f"{where} has {shape.draft_vocab} draft ids for {vocab} target ids and no d2t tensor,"
            " so its ids would be taken for target ids: export it again with d2t and t2d inside."
        )
    return check_map(
        loaded["d2t"], loaded["t2d"], draft_vocab=shape.draft_vocab, vocab=vocab, where=where
    )


def _dtype_warnings(tensors: Mapping[str, Tensor], config: ModelConfig) -> list[str]:
    stored = {t.dtype for name, t in tensors.items() if name.endswith("weight")}
    if config.quantization and stored <= set(FLOATS):
        return [
            f"{config.name} declares {config.quantization.method} and stores only"
            f" {', '.join(sorted(stored))}: SGLang would load it as quantised."
        ]
    return []
