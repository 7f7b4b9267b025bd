"""Checks of what is to be run: server arguments, versions, model and drafter files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastverify.checks import check_versions
from fastverify.doctor.evidence import Evidence
from fastverify.errors import ConfigError
from fastverify.logs.text import to_number
from fastverify.machine.facts import version_tuple
from fastverify.machine.finding import Finding
from fastverify.model.files import INDEX, ModelFiles, read_json, read_tensors
from fastverify.rules import BROKEN_ON_SM120, is_sm120

_OFF = ("", "0", "False", "false", "None")
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_BACKENDS = (
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "speculative_draft_attention_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
)
_FUSION = ("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend")


def lossless(evidence: Evidence) -> Iterator[Finding]:
    """Acceptance thresholds below 1 keep drafts that the target would not have written."""
    for name in _THRESHOLDS:
        value = to_number(evidence.arguments.get(name))
        text = evidence.arguments.get(name, "")
        if value is not None and value < 1 and text not in _OFF:
            flag = name.replace("_", "-")
            sentence = (
                f"--{flag} {text} keeps drafts that the target rejects, so the output is not"
                " lossless and its speed no result; set 1.0."
            )
            yield Finding("warn", "not-lossless", sentence, "R108")


def shape(evidence: Evidence) -> Iterator[Finding]:
    """Draft tokens, steps and tree width that do not fit each other."""
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    words = [evidence.arguments.get(f"speculative_{name}", "") for name in names]
    if not all(word.isdecimal() for word in words):
        return
    steps, topk, tokens = map(int, words)
    if topk > 1:
        text = (
            f"--speculative-eagle-topk {topk} drafts a tree, which fused verify does not support"
            " and some releases fail on by shape; set it to 1."
        )
        yield Finding("fail", "draft-shape-args", text, "R111")
    elif tokens != steps + 1:
        text = (
            f"--speculative-num-draft-tokens is {tokens} and must be steps + 1 = {steps + 1} with"
            " topk 1; set it so."
        )
        yield Finding("fail", "draft-shape-args", text, "R111")


def context_parallel(evidence: Evidence) -> Iterator[Finding]:
    """Decode context parallelism together with a drafter."""
    for name in ("dcp_size", "decode_context_parallel_size"):
        word = evidence.arguments.get(name, "")
        if word.isdecimal() and int(word) > 1 and _drafts(evidence):
            text = (
                f"decode context parallel size {word} with drafts is not supported: captured verify"
                " took rank-local lengths for global ones and garbled text; set it to 1."
            )
            yield Finding("fail", "dcp-verify", text, "R24")


def _drafts(evidence: Evidence) -> bool:
    logged = any(log.speculative for log in evidence.servers)
    return logged or evidence.arguments.get("speculative_algorithm", "None") not in _OFF


def blackwell(evidence: Evidence) -> Iterator[Finding]:
    """Arguments that mean another Blackwell than compute capability 12.x."""
    if evidence.machine is None or not is_sm120(evidence.machine):
        return
    for name in _BACKENDS:
        value = evidence.arguments.get(name, "")
        reason = BROKEN_ON_SM120.get(value) or (
            "has code for compute capability 10 only" if value.startswith("trtllm") else None
        )
        if reason is not None:
            text = (
                f"--{name.replace('_', '-')} {value} {reason}, and these GPUs are compute"
                " capability 12.x; use triton or flashinfer for target, verify and draft."
            )
            yield Finding("fail", "kernel-arch", text, "R61")
    for name in _FUSION:
        value = evidence.arguments.get(name, "")
        if value not in _OFF:
            text = (
                f"--{name.replace('_', '-')} was requested and is not active, because it serves"
                " compute capability 9.0 and 10.x only; leave it out."
            )
            yield Finding("warn", "requested-inactive", text, "R57, R58")


def context_length(evidence: Evidence) -> Iterator[Finding]:
    """Two launches that differ in nothing but the longest context."""
    if len(evidence.measured.arguments) != 2:
        return
    one, two = evidence.measured.arguments
    keys = {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
    if len(keys) == 1 and (key := keys.pop()).replace("-", "_") in (
        "context_length",
        "max_model_len",
    ):
        text = (
            f"the launches differ in {key} alone ({one.get(key)} and {two.get(key)}): the longer"
            " one is slower at short prompts too, 9% in one report, because captured tables are"
            " wider."
        )
        yield Finding("info", "context-length-cost", text, "R19")


def versions(evidence: Evidence) -> Iterator[Finding]:
    """The pinned packages; `python` among them is this interpreter."""
    installed = dict(evidence.versions or {})
    python = version_tuple(installed.pop("python", None))
    if python is None or len(python) < 2:
        return
    try:
        check_versions(installed, (python[0], python[1]))
    except ConfigError as error:
        yield Finding("fail", "versions", str(error), "design 3")


def model(evidence: Evidence) -> Iterator[Finding]:
    """What the launch planner says about model, drafter and arguments."""
    if evidence.refusal is not None:
        yield Finding("fail", "model-unfit", evidence.refusal, "R07, R98, R99")
    if evidence.plan is not None:
        yield from evidence.plan.findings


def missing_layers(files: ModelFiles) -> str | None:
    """Why a checkpoint cannot draft with its own prediction layer; None when it can or has none.

    Raises ConfigError for damaged files.
    """
    raw = files.config or {}
    inner = raw.get("text_config")
    text = inner if isinstance(inner, dict) and "num_hidden_layers" not in raw else raw
    count, layers = text.get("num_nextn_predict_layers"), text.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(layers, int) or count < 1 or not files.folder:
        return None
    names = _names(files, files.folder)
    if not names:
        return None
    wanted = list(range(layers, layers + count))
    gone = [n for n in wanted if not any(f".layers.{n}." in f".{name}" for name in names)]
    if not gone:
        return None
    return (
        f"{files.name} states {count} prediction layer{'s' * (count > 1)} and holds no weight of"
        f" layer {gone[0]}, so it cannot draft with it; take a release that has it or an EAGLE-3"
        " drafter."
    )


def _names(files: ModelFiles, folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        found = read_json(folder / INDEX, "model").get("weight_map")
        return [str(name) for name in found] if isinstance(found, dict) else []
    return list(read_tensors(files, "model"))


CHECKS = (lossless, shape, context_parallel, blackwell, context_length, versions, model)
