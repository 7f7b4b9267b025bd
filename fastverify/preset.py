"""Presets: what is known about a model before its files are on the disk."""

from __future__ import annotations

import importlib.resources
from typing import Any

import msgspec

from fastverify.checks import closest
from fastverify.errors import ConfigError
from fastverify.model.config import ModelConfig, model_config
from fastverify.model.fit import tp_problem


class PresetArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One SGLang argument (`true` for a switch) and the clause that says why."""

    value: str | int | float | bool
    reason: str


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model drafts. steps: drafts a step; lengths: the ones the policy may choose."""

    algorithm: str
    steps: int
    reason: str
    lengths: tuple[int, ...] = (0, 1, 2, 3)
    drafter: str | None = None


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model family as shipped in `fastverify/presets/NAME.toml`."""

    name: str
    title: str
    model: str
    tp: int
    max_running_requests: int
    draft: str | None = None
    config: dict[str, Any] = {}
    speculation: Speculation | None = None
    arguments: dict[str, PresetArgument] = {}


GENERIC = Speculation(
    algorithm="EAGLE3",
    steps=2,
    reason="two drafts, the length that lost least on slow links in published serving logs",
)


def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets."""
    files = importlib.resources.files("fastverify.presets").iterdir()
    return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".toml")))


def load_preset(name: str) -> Preset:
    """Read one shipped preset; ConfigError names the closest one for an unknown name."""
    names = preset_names()
    if name not in names:
        near = closest(name, names)
        hint = f"did you mean {near!r}?" if near else f"the presets are {', '.join(names)}."
        raise ConfigError(
            f"{name!r} is no preset, no folder with a config.json and no OWNER/NAME of a model hub:"
            f" {hint}"
        )
    text = (importlib.resources.files("fastverify.presets") / f"{name}.toml").read_bytes()
    return msgspec.toml.decode(text, type=Preset)


def preset_config(preset: Preset) -> ModelConfig:
    """The shape the preset states, for plans made without the files."""
    return model_config(preset.config, f"preset {preset.name}")


def generic_preset(model: str, config: ModelConfig, gpus: int) -> Preset:
    """A preset for a model we do not ship one for: the largest TP that divides it, no drafter."""
    tp = next((n for n in (16, 8, 4, 2) if n <= gpus and tp_problem(config, n) is None), 1)
    return Preset(
        name="generic",
        title=f"{', '.join(config.architectures)} (no preset)",
        model=model,
        tp=tp,
        max_running_requests=16,
        speculation=GENERIC,
    )
