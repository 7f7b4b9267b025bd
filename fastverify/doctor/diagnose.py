"""All checks over one Evidence, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fastverify.doctor import (
    captures,
    counters,
    links,
    measurements,
    nccl,
    pays,
    peers,
    running,
    servers,
    setup,
)
from fastverify.doctor.evidence import Evidence
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding, Severity

Check = Callable[[Evidence], Iterator[Finding]]
ORDER: tuple[Severity, ...] = ("fail", "warn", "unknown", "info")
CHECKS: tuple[Check, ...] = (
    *peers.CHECKS,
    *links.CHECKS,
    *nccl.CHECKS,
    *servers.CHECKS,
    *counters.CHECKS,
    *captures.CHECKS,
    *measurements.CHECKS,
    *running.CHECKS,
    *pays.CHECKS,
    *setup.CHECKS,
)
CHEAP: tuple[Check, ...] = (*peers.CHECKS, *links.CHECKS, *setup.CHECKS)
# The NCCL rules look at some of the same facts; what they call these is said once.
_SAID_AS = {
    "p2p-not-granted": "peers-refused",
    "p2p-not-probed": "peers-unproved",
}


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Every finding, worst first; equal evidence gives equal findings."""
    found = [finding for check in CHECKS for finding in check(evidence)]
    codes = {finding.code for finding in found}
    found += [
        finding
        for finding in nccl.environment(evidence)
        if finding.code not in codes and _SAID_AS.get(finding.code) not in codes
    ]
    if evidence.complete and evidence.machine is not None:
        found += _unread(evidence.machine)
    return ranked([*evidence.notes, *found])


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first, repetitions dropped, otherwise in the order of the checks."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: ORDER.index(f.severity)))


def _unread(machine: Machine) -> Iterator[Finding]:
    """Facts that could not be read, each with the command that would read it."""
    if machine.nvml_error is not None and not machine.gpus:
        text = (
            f"no GPU could be read ({machine.nvml_error.rstrip('.')}); check the driver with"
            " `nvidia-smi -L`."
        )
        yield Finding("unknown", "no-gpu-read", text, "facts 14")
    elif not machine.gpus:
        hidden = f" of {machine.installed}" if machine.installed else ""
        text = f"no GPU{hidden} is visible to this process; check CUDA_VISIBLE_DEVICES."
        yield Finding("info", "no-gpu", text, "")
    for line in machine.unknown:
        what, _, command = line.partition(": ")
        if what == "gpus":
            continue  # said above
        text = f"{what} could not be read; check `{command}`."
        yield Finding("unknown", "unread", text, "facts 14")


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing is wrong, 1 with warnings, 2 with failures; unknown facts do not count."""
    severities = {finding.severity for finding in findings}
    return 2 if "fail" in severities else 1 if "warn" in severities else 0


def cheap_findings(
    machine: Machine,
    environ: Mapping[str, str],
    tp: int | None = None,
    known: Iterable[Finding] = (),
) -> tuple[Finding, ...]:
    """What the launcher prints: failures and warnings from facts it has already read.

    The NCCL rules are left out, because the launch plan holds their findings; `known` are those,
    and no code of them is repeated. Pure, a few milliseconds.
    """
    evidence = Evidence(machine=machine, environ=dict(environ), tp=tp, complete=True)
    said = {finding.code for finding in known}
    said |= {ours for theirs, ours in _SAID_AS.items() if theirs in said}
    found = ranked(finding for check in CHEAP for finding in check(evidence))
    return tuple(f for f in found if f.severity in ("fail", "warn") and f.code not in said)
