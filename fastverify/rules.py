"""One rule a function: from facts to SGLang arguments and findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.attention.plan import arch_name, load_table
from fastverify.errors import ConfigError
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.model.config import ModelConfig
from fastverify.plan import Line
from fastverify.preset import Preset
from fastverify.request import Request

ATTENTION_FLAGS = (
    "attention-backend",
    "decode-attention-backend",
    "prefill-attention-backend",
)
GRAPH_SWITCHES = ("disable-decode-cuda-graph", "disable-cuda-graph")
# Attention backends that pass SGLang 0.5.23's checks on SM120 or not, and in each case cannot
# serve absorbed MLA there (read in its attention registry and FlashInfer 0.7.2).
BROKEN_ON_SM120 = {
    "trtllm_mla": "passes SGLang's check and fails at the first decode step",
    "cutedsl_mla": "needs SM100",
    "fa3": "needs SM80 or SM90",
    "fa4": "has no absorbed MLA there",
    "flashmla": "has no dense kernel for it",
}


def is_sm120(machine: Machine) -> bool:
    """RTX PRO 6000 Blackwell, RTX 50 and other boards of compute capability 12.x."""
    return any((gpu.compute_capability or (0, 0))[0] == 12 for gpu in machine.gpus)


def has_nvlink(machine: Machine) -> bool:
    """True when any pair of GPUs has NVLink."""
    return any(link.startswith("NV") for row in machine.links for link in row)


def is_dense_mla(config: ModelConfig) -> bool:
    """MLA over the whole prefix; sparse (DSA) models bring their own attention backend."""
    return config.is_mla and not any(
        "Dsa" in name or "V32" in name for name in config.architectures
    )


def speculates(preset: Preset, request: Request) -> bool:
    """True when the server drafts: not switched off, and there is something to draft with."""
    if not request.speculation or preset.speculation is None:
        return False
    if request.value("speculative-algorithm") is not None:
        return False  # the user composes speculation themselves
    return preset.speculation.algorithm != "EAGLE3" or bool(request.draft or preset.draft)


def tp_reason(machine: Machine, config: ModelConfig, tp: int) -> str:
    """Why this tensor-parallel size."""
    size_gb = config.weight_bytes / 1e9
    if machine.gpus and tp > 1:
        about = "" if config.weights_on_disk else "about "
        return f"{about}{size_gb:.0f} GB of weights, {size_gb / tp:.0f} GB a GPU"
    if not machine.gpus:
        return "one process on the CPU" if tp == 1 else f"{tp} processes on the CPU over gloo"
    return "one rank a GPU"


def speculation(
    machine: Machine, preset: Preset, config: ModelConfig, request: Request
) -> Iterator[Line]:
    """EAGLE arguments: a chain (topk 1), so that verify has steps + 1 rows a request."""
    spec = preset.speculation
    if spec is None:
        return
    yield Line("speculative-algorithm", spec.algorithm, "drafts are verified in one pass", "preset")
    draft = request.draft or preset.draft
    if spec.algorithm == "EAGLE3" and draft:
        source = "given with --draft" if request.draft else "the drafter of this preset"
        yield Line(
            "speculative-draft-model-path", draft, source, "user" if request.draft else "preset"
        )
    yield Line("speculative-num-steps", str(spec.steps), spec.reason, "preset")
    yield Line("speculative-eagle-topk", "1", "a chain: the only shape captured at one width")
    rows = request.value("speculative-num-steps") or str(spec.steps)
    rows = str(int(rows) + 1) if rows.isdecimal() else rows
    yield Line("speculative-num-draft-tokens", rows, "the drafts and the bonus token")
    if machine.gpus and spec.drafter and is_dense_mla(config):
        yield Line(
            "speculative-draft-attention-backend",
            "triton",
            "the backend under which SGLang captures draft-extend for MLA and MHA drafters alike",
        )


def attention(machine: Machine, config: ModelConfig, request: Request) -> Line | None:
    """The target's attention backend; None leaves SGLang's choice."""
    if not is_dense_mla(config):
        return None
    if request.attention == "flashinfer":
        return Line("attention-backend", "flashinfer", "chosen with --fastverify-attention", "user")
    if request.attention == "triton":
        return Line("attention-backend", "triton", "chosen with --fastverify-attention", "user")
    reason = "every step of it replays a graph"
    if verify_kernel(machine, config, request):
        reason = "prefill and metadata; verify goes to fastverify's kernel"
    return Line("attention-backend", "triton", reason)


def verify_kernel(machine: Machine, config: ModelConfig, request: Request) -> Line | None:
    """The variable that puts our MLA verify kernel into SGLang's Triton backend."""
    wanted = request.attention in ("auto", "fastverify") and is_dense_mla(config)
    other = any((request.value(flag) or "triton") != "triton" for flag in ATTENTION_FLAGS)
    capabilities = {gpu.compute_capability for gpu in machine.gpus}
    if len(capabilities) != 1 or None in capabilities or not wanted or other:
        return None
    (capability,) = capabilities
    arch = arch_name(capability) if capability else ""
    table = load_table().get(arch)
    if table is None:
        return None
    how = "measured" if table.measured else "chosen by the limits of this GPU, not measured"
    reason = f"verify reads the prefix in parallel; its tiles are {how}"
    return Line("FASTVERIFY_ATTENTION", "verify", reason)


def gpu_arguments(
    machine: Machine, config: ModelConfig, request: Request, tp: int
) -> Iterator[Line]:
    """Arguments that follow from the GPUs."""
    chosen = attention(machine, config, request)
    if chosen:
        yield chosen
    if tp > 2 and not has_nvlink(machine):
        yield Line(
            "disable-custom-all-reduce",
            "",
            "SGLang's own kernels refuse more than two GPUs without NVLink, and warn about it",
            "machine",
        )
    if is_sm120(machine) and request.value("flashinfer-allreduce-fusion-backend"):
        raise ConfigError(
            "--flashinfer-allreduce-fusion-backend"
            f" {request.value('flashinfer-allreduce-fusion-backend')} ends the server at start on"
            " compute capability 12.x (SGLang 0.5.23 takes 9.0 and 10.x only): leave the flag out."
        )
    for flag in ATTENTION_FLAGS:
        value = request.value(flag)
        if value in BROKEN_ON_SM120 and is_sm120(machine):
            raise ConfigError(
                f"--{flag} {value} {BROKEN_ON_SM120[value]}, and this machine is compute capability"
                " 12.x: use triton or flashinfer."
            )


def graphs_switched_off(request: Request) -> str | None:
    """How the user turned decode graphs off; None when they did not."""
    for flag in GRAPH_SWITCHES:
        if request.value(flag) is not None:
            return f"--{flag} was given"
    if request.value("cuda-graph-backend-decode") == "disabled":
        return "--cuda-graph-backend-decode disabled was given"
    return None


def findings(
    machine: Machine, preset: Preset, config: ModelConfig, request: Request, tp: int
) -> Iterator[Finding]:
    """What the plan costs or leaves open."""
    if not machine.gpus:
        yield Finding(
            "info",
            "no-gpu",
            "there is no GPU: SGLang runs on the CPU, where times mean nothing, no graph is"
            " captured, and verification is greedy whatever the temperature.",
        )
    if preset.speculation and not request.speculation:
        yield Finding(
            "info", "speculation-off", "speculation is off: every step gives one token a request."
        )
    elif request.value("speculative-algorithm") is not None:
        text = (
            "you chose the speculation yourself: fastverify plans no drafts and no graphs for it."
        )
        yield Finding("info", "speculation-yours", text)
    elif not speculates(preset, request):
        yield Finding(
            "info", "no-drafter", "no drafter is known for this model: give one with --draft PATH."
        )
    if machine.gpus and graphs_switched_off(request):
        yield Finding(
            "warn",
            "graphs-off",
            "decode graphs are off: on 8 PCIe GPUs a verify of 3 tokens took 30 ms eager, and 12 to"
            " 15 ms are expected from a graph.",
        )
    if machine.gpus and tp > 2 and not has_nvlink(machine):
        yield Finding(
            "info",
            "peers-unproved",
            "all-reduces go through NCCL: the peers of this machine have not been proved, and no"
            " peer kernel is used unproved.",
        )
