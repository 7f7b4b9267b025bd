"""Does an EAGLE-3 drafter fit its target: checked from configs and headers, before any load.

SGLang 0.5.23 checks little of this. It skips weights whose names it does not know, leaves absent
ones random, and maps draft ids wherever the checkpoint says; the server then runs and accepts
almost nothing. Rules are read from models/llama_eagle3.py and models/kimi_k25_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastverify.errors import ConfigError
from fastverify.model.aux_layers import aux_layers
from fastverify.model.config import Fields, ModelConfig, model_config
from fastverify.model.drafter_weights import DraftShape, Kind, check_weights
from fastverify.model.files import (
    ModelFiles,
    disk_bytes,
    pickled_weights,
    read_tensors,
    resolve,
    weight_files,
)
from fastverify.model.kinship import kinship_warnings

ACCEPTED: Mapping[str, Kind] = {
    "LlamaForCausalLMEagle3": "mha",
    "Eagle3DeepseekV2ForCausalLM": "mla",
}


class DrafterFacts(msgspec.Struct, frozen=True):
    """A drafter that passed every check that could be made.

    aux_layers: target layers before which SGLang captures hidden states (empty: last one only).
    map_checked: the vocabulary map was read and is sound, or none is needed.
    unchecked: checks that could not be made, and why; warnings: what is legal but suspicious.
    """

    architecture: str
    kind: Kind
    config: ModelConfig
    aux_layers: tuple[int, ...]
    draft_vocab: int
    map_checked: bool
    unchecked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Decoder layers that run once per draft token."""
        return self.config.layers

    @property
    def aux_count(self) -> int:
        """Hidden states that the drafter's `fc` joins."""
        return len(self.aux_layers)


def check_drafter(
    target: ModelConfig,
    draft: str,
    *,
    target_folder: Path | None = None,
    dummy_weights: bool = False,
    cache_dir: Path | None = None,
) -> DrafterFacts | None:
    """Check a drafter against its target; None when it is a hub name not on this disk.

    draft: folder, config.json or hub name. target_folder: where the target's tokenizer lies.
    dummy_weights: SGLang will make weights up, so that none are read.
    Raises ConfigError with what does not fit, its value and the value that would.
    """
    where = f"draft {draft}"
    files = resolve(draft, what="draft", cache_dir=cache_dir)
    if files.config is None or files.folder is None:
        return None
    raw = files.config
    architecture = _architecture(raw, where)
    kind = ACCEPTED[architecture]
    size = None if dummy_weights else disk_bytes(files, "draft")
    config = model_config(raw, where, disk_size=size)
    _check_shape(target, config, raw, kind)
    captured = aux_layers(target, raw, kind, where)
    draft_vocab = _draft_vocab(target, config, raw, kind)
    warnings = [*kinship_warnings(target.name, draft, raw, target_folder, files.folder)]
    if config.layers > 1:
        warnings.append(f"{where} has {config.layers} layers, each of which runs for every draft.")
    unread = _why_unread(files, dummy_weights)
    if unread is None:
        shape = DraftShape(target, config, kind, len(captured), draft_vocab, _own_head(raw))
        warnings += check_weights(read_tensors(files, "draft"), shape)
    return DrafterFacts(
        architecture=architecture,
        kind=kind,
        config=config,
        aux_layers=captured,
        draft_vocab=draft_vocab,
        map_checked=unread is None or draft_vocab == target.vocab,
        unchecked=() if unread is None else (f"weights and vocabulary map of {where}: {unread}",),
        warnings=tuple(warnings),
    )


def _why_unread(files: ModelFiles, dummy_weights: bool) -> str | None:
    """Why the drafter's tensors cannot be looked at, None when they can."""
    if dummy_weights:
        return "random weights were asked for"
    if weight_files(files, "draft"):
        return None
    if pickled_weights(files):
        return "only safetensors files can be read without running their code"
    if files.source == "cache":
        return "not on this disk yet"
    raise ConfigError(
        f"draft {files.name} has a config.json and no weight files (*.safetensors or *.bin):"
        " complete the download."
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    name = Fields(dict(raw), where).names("architectures")[0]
    if name in ACCEPTED:
        return name
    accepted = " or ".join(ACCEPTED)
    raise ConfigError(
        f"{where} has architecture {name}, {_what_it_is(name)}: an EAGLE-3 drafter for SGLang"
        f" 0.5.23 is {accepted}."
    )


def _what_it_is(name: str) -> str:
    low = name.lower()
    if "eagle3" in low:
        return "an EAGLE-3 drafter under another engine's class name"
    if "dflash" in low or "dspark" in low:
        return "a drafter of another method (DFlash or DSpark)"
    if low.endswith("nextn") or "mtp" in low:
        return "a next-token prediction (MTP) layer"
    if "eagle" in low:
        return "a drafter of EAGLE 1 or 2"
    if "medusa" in low or "speculator" in low:
        return "a drafter of another method"
    return "a full model and no drafter"


def _check_shape(
    target: ModelConfig, config: ModelConfig, raw: Mapping[str, Any], kind: Kind
) -> None:
    where = config.name
    reads = _target_hidden(config, raw)
    if reads != target.hidden:
        field = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
        raise ConfigError(
            f"{where} reads hidden states of width {reads} ({field}), but {target.name} has"
            f" {target.hidden}: use a drafter made for this target."
        )
    if config.vocab != target.vocab:
        raise ConfigError(
            f"{where} has vocab_size {config.vocab}, but {target.name} has {target.vocab}: use a"
            " drafter made for this target (a smaller output vocabulary is draft_vocab_size)."
        )
    if kind == "mla" and config.layers != 1:
        raise ConfigError(
            f"{where} has num_hidden_layers {config.layers}, but SGLang 0.5.23 builds MLA drafters"
            " with exactly 1: use a drafter of one layer."
        )
    if kind == "mla" and not (config.is_mla and config.q_lora_rank):
        raise ConfigError(
            f"{where} has kv_lora_rank {config.kv_lora_rank} and q_lora_rank {config.q_lora_rank},"
            " but an Eagle3DeepseekV2ForCausalLM needs both above 0: restore its config.json."
        )


def _target_hidden(config: ModelConfig, raw: Mapping[str, Any]) -> int:
    return Fields(dict(raw), config.name).whole("target_hidden_size", default=config.hidden)


def _own_head(raw: Mapping[str, Any]) -> bool:
    """False when the drafter's output is tied to its embedding or is the target's head."""
    return raw.get("draft_vocab_size") is not None and not raw.get("tie_word_embeddings")


def _draft_vocab(
    target: ModelConfig, config: ModelConfig, raw: Mapping[str, Any], kind: Kind
) -> int:
    where = config.name
    if kind == "mha" and "draft_vocab_size" not in raw:
        raise ConfigError(
            f"{where} has no draft_vocab_size in its config.json, without which SGLang 0.5.23 ends"
            f" at load: add it, {target.vocab} or null when the drafter uses the whole vocabulary."
        )
    draft_vocab = Fields(dict(raw), where).whole("draft_vocab_size", default=config.vocab)
    if draft_vocab > target.vocab:
        raise ConfigError(
            f"{where} has draft_vocab_size {draft_vocab}, larger than the vocabulary of"
            f" {target.name}, {target.vocab}: use a drafter made for this target."
        )
    if raw.get("tie_word_embeddings") and draft_vocab != config.vocab:
        raise ConfigError(
            f"{where} ties its output to its embedding of {config.vocab} tokens, but has"
            f" draft_vocab_size {draft_vocab}: untie them or make the two equal."
        )
    shares_head = not (_own_head(raw) or raw.get("tie_word_embeddings"))
    if shares_head and config.hidden != target.hidden:
        raise ConfigError(
            f"{where} has no output head of its own (draft_vocab_size is unset) and hidden size"
            f" {config.hidden}, so it cannot use the head of {target.name}, made for"
            f" {target.hidden}: use a drafter with its own head."
        )
    return draft_vocab
