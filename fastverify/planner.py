"""plan(): machine, preset and the user's flags -> LaunchPlan. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from fastverify import rules
from fastverify.comm.nccl import LaunchFacts, nccl_settings
from fastverify.cpu.environment import cpu_arguments, cpu_environment
from fastverify.errors import ConfigError
from fastverify.graphs import CapturePlan, batch_sizes, capture_plan
from fastverify.inputs import Inputs
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.machine.topology import Topology, classify
from fastverify.model.config import ModelConfig, check_tp, weights_fit
from fastverify.plan import LaunchPlan, Line, Source, merge
from fastverify.preset import Preset
from fastverify.request import Request

# A model this small may be tried on a CPU; anything larger needs the GPUs it was made for.
CPU_WEIGHT_BYTES = 2 << 30
SOURCES: dict[str, Source] = {"fastverify": "machine", "user": "user", "upstream": "sglang"}


def plan(inputs: Inputs, user_env: Mapping[str, str]) -> LaunchPlan:
    """Everything SGLang is started with.

    user_env: the variables of the user's shell.
    Raises ConfigError when the model cannot run here, naming the value and the limit.
    """
    machine, preset, config, request = (
        inputs.machine,
        inputs.preset,
        inputs.config,
        inputs.request,
    )
    tp, pp = tp_size(preset, request), whole(request, "pp-size", 1)
    check_hardware(machine, preset, config, request, tp * pp)
    check_tp(config, tp)
    check_memory(machine, config, tp * pp)
    topology = classify(machine, tp)
    lengths = (_steps(preset, request),) if rules.speculates(preset, request) else ()
    planned = list(_arguments(machine, preset, config, request, tp))
    given = [
        Line(g.flag, shlex.join(g.values), "given on the command line", "user")
        for g in request.given
    ]
    environment, findings = _environment(inputs, topology, tp, user_env)
    own = rules.findings(machine, preset, config, request, tp)
    return LaunchPlan(
        title=preset.title,
        machine=describe(machine, topology),
        arguments=merge(planned, given),
        environment=environment,
        graphs=capture(planned, preset, request, lengths, not machine.gpus),
        findings=(*own, *inputs.findings, *findings),
        draft_lengths=lengths,
    )


def _steps(preset: Preset, request: Request) -> int:
    default = preset.speculation.steps if preset.speculation else 0
    return whole(request, "speculative-num-steps", default)


def check_memory(machine: Machine, config: ModelConfig, gpus: int) -> None:
    """Refuse weights that overfill the GPUs; says nothing where their memory is unknown."""
    sizes = [gpu.memory_bytes for gpu in machine.gpus[:gpus] if gpu.memory_bytes]
    if machine.gpus and len(sizes) == gpus:
        weights_fit(config, sizes, gpus)


def whole(request: Request, flag: str, default: int) -> int:
    """A positive whole number the user gave for a flag, or the default."""
    text = request.value(flag)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{flag} is {text!r}, but it takes a whole number from 1 up.")
    return int(text)


def tp_size(preset: Preset, request: Request) -> int:
    """The user's tp, else the preset's."""
    return whole(request, "tp-size", preset.tp)


def check_hardware(
    machine: Machine, preset: Preset, config: ModelConfig, request: Request, gpus: int
) -> None:
    """Refuse a model that this machine cannot hold at all."""
    found = len(machine.gpus)
    if found == 0 and preset.name != "tiny" and config.weight_bytes > CPU_WEIGHT_BYTES:
        raise ConfigError(
            f"{request.model} needs {gpus} GPUs and this machine shows none: use --model tiny to"
            " see the whole path on the CPU, or --plan --machine FILE.json for another machine."
        )
    if 0 < found < gpus:
        raise ConfigError(
            f"tp x pp asks for {gpus} GPUs and this machine shows {found}: lower --tp-size to"
            f" {found} or less, or free the others (CUDA_VISIBLE_DEVICES)."
        )


def _arguments(
    machine: Machine, preset: Preset, config: ModelConfig, request: Request, tp: int
) -> Iterator[Line]:
    yield Line("model-path", preset.model, "what is served", "preset")
    yield Line("tp-size", str(tp), rules.tp_reason(machine, config, tp), "preset")
    for name, argument in preset.arguments.items():
        value = "" if argument.value is True else str(argument.value)
        yield Line(name, value, argument.reason, "preset")
    running = whole(request, "max-running-requests", preset.max_running_requests)
    yield Line(
        "max-running-requests",
        str(running),
        "the largest batch, so that every batch up to it can be captured",
        "preset",
    )
    if rules.speculates(preset, request):
        yield from rules.speculation(machine, preset, config, request)
    if machine.gpus:
        yield from rules.gpu_arguments(machine, config, request, tp)
        sizes = " ".join(map(str, batch_sizes(running)))
        yield Line("cuda-graph-bs-decode", sizes, "every batch that can occur replays a graph")
    else:
        for name, value, reason in cpu_arguments(tp):
            yield Line(name, value, reason, "machine")
    yield Line("enable-metrics", "", "accept length is read from counters, not from gauges")


def capture(
    planned: list[Line], preset: Preset, request: Request, lengths: tuple[int, ...], on_cpu: bool
) -> CapturePlan:
    """The graphs SGLang will capture for these arguments."""
    given = request.value("cuda-graph-bs-decode")
    values = {line.name: line.value for line in planned}
    batches = (given or values.get("cuda-graph-bs-decode", "1")).split()
    if not all(size.isdecimal() and int(size) > 0 for size in batches):
        raise ConfigError(
            f"--cuda-graph-bs-decode holds {' '.join(batches)!r}, but it takes batch sizes"
            " from 1 up."
        )
    drafter = preset.speculation.drafter if preset.speculation else None
    return capture_plan(
        lengths,
        tuple(sorted({int(size) for size in batches})),
        drafter="mha" if drafter == "mha" else "mla" if drafter else None,
        draft_backend=request.value("speculative-draft-attention-backend")
        or values.get("speculative-draft-attention-backend")
        or request.value("attention-backend")
        or values.get("attention-backend"),
        switched_off="there are no CUDA graphs on the CPU"
        if on_cpu
        else rules.graphs_switched_off(request),
    )


def _environment(
    inputs: Inputs, topology: Topology, tp: int, user_env: Mapping[str, str]
) -> tuple[tuple[Line, ...], tuple[Finding, ...]]:
    machine, request = inputs.machine, inputs.request
    if not machine.gpus:
        kept = [
            Line(name, user_env[name], f"yours; the plan had {value}: {reason}", "user")
            if name in user_env and user_env[name] != value
            else Line(name, value, reason, "machine")
            for name, value, reason in cpu_environment(tp, machine.cpu_count or 1)
        ]
        return tuple(kept), ()
    facts = LaunchFacts(
        nodes=whole(request, "nnodes", 1),
        graph_text=inputs.graph_text,
        symm_mem=request.value("enable-symm-mem") is not None,
        nvls=request.value("enable-nccl-nvls") is not None,
        dcp=whole(request, "dcp-size", 1),
    )
    found = nccl_settings(machine, topology, tp, user_env, request.profile, facts)
    lines = [Line(s.name, s.value, s.reason, SOURCES[s.source]) for s in found.settings]
    kernel = rules.verify_kernel(machine, inputs.config, request)
    return (*lines, *((kernel,) if kernel else ())), found.findings


def describe(machine: Machine, topology: Topology) -> str:
    """One line about the machine, for the head of the plan."""
    if not machine.gpus:
        return f"no GPU, {machine.cpu_count} CPU cores"
    names: dict[str, int] = {}
    for gpu in machine.gpus:
        names[gpu.name] = names.get(gpu.name, 0) + 1
    boards = ", ".join(f"{count} x {name}" for name, count in names.items())
    driver = f", driver {machine.driver_version}" if machine.driver_version else ""
    nccl = f", NCCL {machine.nccl_version}" if machine.nccl_version else ""
    return f"{boards}; {topology.kind.value.replace('_', ' ')}{driver}{nccl}"
