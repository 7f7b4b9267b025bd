"""Everything a plan is made from, read once: machine, preset, model and drafter files."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import msgspec

from fastverify import rules
from fastverify.errors import ConfigError
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.machine.probe import read_machine
from fastverify.machine.store import load_machine
from fastverify.model.config import ModelConfig, load_model_config, model_config
from fastverify.model.drafter import check_drafter
from fastverify.model.files import resolve
from fastverify.preset import Preset, generic_preset, load_preset, preset_config, preset_names
from fastverify.request import Request


class Inputs(msgspec.Struct, frozen=True):
    """Facts and wishes; `findings` holds what could not be checked and what looks odd."""

    machine: Machine
    preset: Preset
    config: ModelConfig
    request: Request
    graph_text: str | None = None
    findings: tuple[Finding, ...] = ()


def gather(request: Request, environ: Mapping[str, str] = os.environ) -> Inputs:
    """Read what the request names. Raises ConfigError for anything missing or unfit."""
    machine = load_machine(request.machine) if request.machine else read_machine()
    if request.model == "tiny":
        request, preset, config = _tiny(request)
        folder = None if request.plan else pathlib.Path(preset.model)
        found: tuple[Finding, ...] = ()
    else:
        preset, config, folder = _model(request, machine)
        found = () if folder else (_not_here("model", preset.model),)
    if rules.speculates(preset, request):
        preset, more = _drafter(request, preset, config, folder)
        found += more
    graph = _graph_text(environ) if not request.machine else None
    return Inputs(machine, preset, config, request, graph, found)


def _tiny(request: Request) -> tuple[Request, Preset, ModelConfig]:
    """The embedded model: made on first use; a plan alone does not make it."""
    from fastverify.tiny import build
    from fastverify.tiny.config import CONFIG

    preset = load_preset("tiny")
    config = model_config(CONFIG, "tiny")
    paths = build.tiny_paths() if request.plan else build.build_tiny()
    replaced = msgspec.structs.replace(preset, model=str(paths.target), draft=str(paths.draft))
    return request, replaced, config


def _model(request: Request, machine: Machine) -> tuple[Preset, ModelConfig, pathlib.Path | None]:
    if request.model in preset_names():
        preset = load_preset(request.model)
        files = resolve(preset.model)
        config = load_model_config(files, dummy_weights=_dummy(request)) or preset_config(preset)
        return preset, config, files.folder
    if not _is_path_or_hub(request.model):
        load_preset(request.model)  # names the closest preset
    files = resolve(request.model)
    known = load_model_config(files, dummy_weights=_dummy(request))
    if known is not None:
        return generic_preset(request.model, known, len(machine.gpus)), known, files.folder
    for name in preset_names():
        preset = load_preset(name)
        if preset.model == request.model:
            return preset, preset_config(preset), None
    raise ConfigError(
        f"the config.json of {request.model} is not on this disk and no preset describes it:"
        f" run `hf download {request.model} config.json` first, or give a folder."
    )


def _is_path_or_hub(name: str) -> bool:
    return "/" in name or os.path.exists(name)


def _drafter(
    request: Request, preset: Preset, config: ModelConfig, folder: pathlib.Path | None
) -> tuple[Preset, tuple[Finding, ...]]:
    """Check the drafter against its target; its kind replaces the preset's guess."""
    speculation = preset.speculation
    draft = request.draft or preset.draft
    made_later = request.plan and request.model == "tiny" and not request.draft
    if speculation is None or speculation.algorithm != "EAGLE3" or not draft or made_later:
        return preset, ()
    dummy = request.value("speculative-draft-load-format") == "dummy"
    facts = check_drafter(config, draft, target_folder=folder, dummy_weights=dummy)
    if facts is None:
        return preset, (_not_here("drafter", draft),)
    findings = [Finding("warn", "drafter", text) for text in facts.warnings]
    findings += [Finding("unknown", "drafter-unchecked", f"{t}.") for t in facts.unchecked]
    known = msgspec.structs.replace(speculation, drafter=facts.kind)
    return msgspec.structs.replace(preset, speculation=known), tuple(findings)


def _dummy(request: Request) -> bool:
    return request.value("load-format") == "dummy"


def _not_here(what: str, name: str) -> Finding:
    return Finding(
        "info",
        f"{what}-not-here",
        f"{what} {name} is not on this disk: SGLang will download it, and its files were not"
        " checked.",
    )


def _graph_text(environ: Mapping[str, str]) -> str | None:
    path = environ.get("NCCL_GRAPH_FILE", "")
    try:
        return pathlib.Path(path).read_text() if path else None
    except (OSError, UnicodeDecodeError):
        return None
