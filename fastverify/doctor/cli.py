"""`fastverify doctor`: says what is wrong with this machine, or with a recorded one."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec

from fastverify.doctor.collect import collect, merge
from fastverify.doctor.diagnose import diagnose
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.live import read_live
from fastverify.doctor.measured import merge_measured
from fastverify.doctor.probing import run_probe
from fastverify.doctor.report import print_report
from fastverify.doctor.setup import missing_layers
from fastverify.errors import ConfigError
from fastverify.inputs import gather
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.machine.store import load_machine
from fastverify.machine.topology import classify
from fastverify.model.files import resolve
from fastverify.planner import describe
from fastverify.planner import plan as make_plan
from fastverify.request import Request


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].lower()}{message[1:]}: see `{self.prog} --help`.")


def doctor_main(
    argv: Sequence[str],
    read: Callable[[Mapping[str, str]], Evidence] = read_live,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Print the report; returns 0 (nothing wrong), 1 (warnings) or 2 (failures).

    Raises ConfigError for arguments and files that cannot be used.
    """
    options = _parser().parse_args(list(argv))
    environ = dict(os.environ if environ is None else environ)
    if options.machine and options.probe:
        raise ConfigError(
            f"--machine {options.machine} is another machine, so its peers cannot be probed from"
            " here: leave out --probe, or run it there."
        )
    if options.machine:
        # This shell's variables say nothing about a machine that was recorded elsewhere.
        evidence = Evidence(machine=load_machine(options.machine), complete=True, environ={})
    else:
        evidence = read(environ)
    evidence = merge(evidence, collect(options.files, evidence.machine))
    evidence = msgspec.structs.replace(
        evidence,
        tp=options.tp,
        accept_length=options.accept_length,
        step_ms=options.step_ms,
        iteration_ms=options.iteration_ms,
    )
    if options.probe and evidence.machine is not None:
        evidence = _probed(evidence, evidence.machine)
    if options.model:
        evidence = _with_model(evidence, options, environ)
    elif options.draft:
        raise ConfigError("--draft needs --model, because a drafter fits one target: name both.")
    title = f"fastverify doctor: {_about(evidence.machine)}"
    return print_report(title, diagnose(evidence), everything=options.all, as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="fastverify doctor",
        description="Say what is wrong with this machine before it hangs. Nothing needs root.",
        epilog="exit code: 0 nothing wrong, 1 warnings, 2 failures",
    )
    add = made.add_argument
    add("files", nargs="*", metavar="FILE",
        help="recorded files to judge as well, of any kind `fastverify logs` reads")  # fmt: skip
    add("--machine", metavar="FILE", help="judge a recorded machine (`fastverify machine > FILE`)")
    add("--json", action="store_true", help="print the findings as JSON")
    add("--all", action="store_true", help="show everything, with sources")
    add("--probe", action="store_true", help="prove peer access and measure every pair of GPUs")
    add("--tp", type=_count, metavar="N", help="GPUs of the tensor-parallel group (default: all)")
    add("--model", metavar="NAME_OR_PATH", help="check this model's launch plan too")
    add("--draft", metavar="PATH", help="check this drafter against the model")
    add("--accept-length", type=_number, metavar="X", help="tokens a verify step, bonus included")
    add("--step-ms", type=_number, metavar="MS", help="measured time of a plain decode step")
    add("--iteration-ms", type=_number, metavar="MS", help="measured draft + verify + host time")
    return made


def _number(text: str) -> float:
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _probed(evidence: Evidence, machine: Machine) -> Evidence:
    found = run_probe(machine)
    measured = merge_measured([evidence.measured, found.measured])
    notes = (*evidence.notes, *found.notes)
    return msgspec.structs.replace(evidence, measured=measured, notes=notes)


def _with_model(
    evidence: Evidence, options: argparse.Namespace, environ: Mapping[str, str]
) -> Evidence:
    """The launch plan of a model on this machine, or the sentence that refuses it."""
    request = Request(model=options.model, draft=options.draft, machine=options.machine)
    try:
        inputs = gather(msgspec.structs.replace(request, plan="auto"), environ)
        plan = make_plan(inputs, evidence.environ or {})
        notes = _own_layers(inputs.preset.model, inputs.preset.speculation is not None)
    except ConfigError as error:
        return msgspec.structs.replace(evidence, refusal=str(error))
    tp = evidence.tp or int(plan.value("tp-size") or 1)
    return msgspec.structs.replace(evidence, plan=plan, tp=tp, notes=(*evidence.notes, *notes))


def _own_layers(model: str, speculates: bool) -> list[Finding]:
    problem = missing_layers(resolve(model)) if speculates else None
    return [Finding("fail", "mtp-missing", problem, "R102")] if problem else []


def _about(machine: Machine | None) -> str:
    if machine is None:
        return "no machine"
    return describe(machine, classify(machine, max(1, len(machine.gpus))))
