"""NCCL: what it will choose in this environment, and what its log shows it chose."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from fastverify.comm.nccl import LaunchFacts, nccl_settings
from fastverify.comm.nccl_graph import check_graph_file
from fastverify.comm.nccl_values import number
from fastverify.doctor.evidence import Evidence
from fastverify.logs.nccl import NcclLog
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.machine.topology import classify

_BUFFER_BYTES = 4 << 20
_FAILED_GBS = 1.0
_POOR_GBS = 16.0
_RING = 4


def environment(evidence: Evidence) -> Iterator[Finding]:
    """The NCCL rules over this machine and environment; the launcher applies the same."""
    environ = evidence.environ
    if environ is None and evidence.nccl is not None and evidence.nccl.environment:
        environ = evidence.nccl.environment
    if environ is None and evidence.complete:
        environ = {}
    if environ is None or evidence.plan is not None:
        return
    machine = evidence.machine or Machine()
    if evidence.nccl is not None and evidence.nccl.version is not None:
        machine = msgspec.structs.replace(machine, nccl_version=evidence.nccl.version)
    tp = max(1, evidence.ranks)
    facts = LaunchFacts(
        groups=evidence.measured.groups,
        nodes=evidence.measured.hosts or 1,
        peers=evidence.peers,
        graph_text=evidence.graph_text,
    )
    plan = nccl_settings(machine, classify(machine, tp), tp, environ, evidence.profile, facts)
    yield from plan.findings
    ours = plan.environment()
    if ours and evidence.ranks > 1:
        words = " ".join(shlex.join([f"{name}={value}"]) for name, value in ours.items())
        text = f"`fastverify` starts the server with {words}; set the same for other programs."
        yield Finding("info", "nccl-would-set", text, "R90, R91")


def graph_file(evidence: Evidence) -> Iterator[Finding]:
    """A graph file against the group sizes, when the environment does not name one."""
    if evidence.graph_text is None or (evidence.environ or {}).get("NCCL_GRAPH_FILE"):
        return
    sizes = evidence.measured.groups or ((evidence.ranks,) if evidence.ranks > 1 else ())
    if not sizes:
        text = (
            "the graph file was checked for its form only; name the group sizes in a measurements"
            " file or a machine file, because NCCL applies it to every group."
        )
        yield Finding("unknown", "graph-file-groups", text, "R79")
    yield from check_graph_file(evidence.graph_text, sizes)


def library(evidence: Evidence) -> Iterator[Finding]:
    """The NCCL that was loaded against the one that is installed, and versions too old."""
    log = evidence.nccl
    if log is None:
        return
    installed = evidence.machine.nccl_version if evidence.machine else None
    if log.version and installed and not installed.startswith(log.version):
        text = (
            f"the log shows NCCL {log.version} and this environment has {installed}; look for"
            " LD_PRELOAD, SGLANG_NCCL_SO_PATH and a second nvidia-nccl package."
        )
        yield Finding("warn", "nccl-version-differs", text, "facts 14")
    if log.shared_memory is not None:
        needed, allowed = log.shared_memory
        named = f"NCCL {log.version}" if log.version else "this NCCL"
        text = (
            f"{named} needs {needed} bytes of shared memory a block and this GPU allows {allowed}:"
            " it is too old for compute capability 12, install 2.26.5 or later."
        )
        yield Finding("fail", "nccl-too-old", text, "R30")
    if log.host_fallback:
        text = (
            "NCCL fell back from cuMem host buffers to shared-memory files, which is harmless from"
            " 2.26.5 on; give the container SYS_NICE to avoid it."
        )
        yield Finding("info", "nccl-host-fallback", text, "facts 13")


def search(evidence: Evidence) -> Iterator[Finding]:
    """The rings NCCL found, and searches that failed."""
    log = evidence.nccl
    for result in log.searches if log else ():
        speed = f"{result.intra_gbs:g}/{result.inter_gbs:g} GB/s"
        shape = f"{result.channels} channels, {speed}, {result.intra_type}/{result.inter_type}"
        failed = result.intra_gbs < _FAILED_GBS
        crosses = result.intra_type == "SYS" and result.intra_gbs <= _POOR_GBS
        if failed or (result.pattern == _RING and crosses and result.channels <= 2):
            what = "failed" if failed else "found a poor ring"
            text = (
                f"NCCL's graph search {what} (pattern {result.pattern}: {shape}), which costs it LL"
                " for small messages; give it an NCCL_GRAPH_FILE made for this machine and group."
            )
            yield Finding("warn", "nccl-ring-poor", text, "R78")
        elif result.pattern == _RING:
            text = f"NCCL's ring has {shape}."
            yield Finding("info", "nccl-ring", text, "R78")


def paths(evidence: Evidence) -> Iterator[Finding]:
    """Transports and protocols in use."""
    log = evidence.nccl
    if log is None:
        return
    if log.transports:
        parts = ", ".join(f"{count} over {name}" for name, count in sorted(log.transports.items()))
        text = f"NCCL connected {sum(log.transports.values())} channels: {parts}."
        yield Finding("info", "nccl-transports", text, "facts 13")
    links = {s.intra_type for s in log.searches}
    if "LL128" in log.protocols and links and not links & {"NVL", "NVB"}:
        text = (
            "LL128 is enabled for all-reduce although no NVLink carries it, so NCCL_PROTO forced it"
            " past NCCL's safety test; use ^LL128, or soak-test it with checked values first."
        )
        yield Finding("warn", "proto-ll128-forced", text, "R81")


def errors(evidence: Evidence) -> Iterator[Finding]:
    """Errors that name their cause."""
    log = evidence.nccl
    if log is None:
        return
    if log.missing_device is not None:
        text = (
            f"the graph file names GPU {log.missing_device}, which a smaller group does not have;"
            " unset NCCL_GRAPH_FILE, or keep one file per group size."
        )
        yield Finding("fail", "graph-file-device", text, "R79")
    if log.calloc_bytes is not None:
        text = (
            f"NCCL found no room for {log.calloc_bytes} bytes{_reserve(log)}; lower"
            " --mem-fraction-static by 0.02 or use fewer channels."
        )
        yield Finding("fail", "nccl-no-memory", text, "R80")
    if log.shm_failed:
        have = evidence.machine.shm_bytes if evidence.machine else None
        size = f" in a mount of {have >> 20} MiB" if have is not None else ""
        text = (
            f"NCCL could not make a shared-memory segment{size}; start the container with"
            " --shm-size=16g or --ipc=host."
        )
        yield Finding("fail", "shm-failed", text, "R113")


def _reserve(log: NcclLog) -> str:
    channels = max((s.channels for s in log.searches if s.pattern == _RING), default=0)
    if not channels or not log.ranks:
        return ""
    buffer = number(log.environment.get("NCCL_BUFFSIZE", "")) or _BUFFER_BYTES
    total = channels * buffer * (log.ranks - 1)
    return (
        f" ({channels} channels x {buffer >> 20} MiB x {log.ranks - 1} peers = {total >> 20} MiB)"
    )


def hang(evidence: Evidence) -> Iterator[Finding]:
    """Where each rank stands, when they do not stand at the same collective."""
    log = evidence.nccl
    if log is None:
        return
    counts = {last.count for last in log.last.values()}
    if len(counts) > 1:
        slowest = min(counts)
        behind = [rank for rank, last in sorted(log.last.items()) if last.count == slowest]
        name = log.last[behind[0]].name
        where = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind[:8]))}"
        text = (
            f"{where} last entered {name} number {slowest} while others reached number"
            f" {max(counts)}; look there for the first error or for a path chosen by one rank"
            " alone."
        )
        yield Finding("fail", "ranks-diverge", text, "R39, R72")
    elif len(log.last) > 1:
        last = next(iter(log.last.values()))
        text = (
            f"all {len(log.last)} ranks last entered {last.name} number {last.count}; if the server"
            " hangs, the transport did not deliver and no rank went astray."
        )
        yield Finding("info", "ranks-together", text, "R40")
    if log.ends_at == "init" and not log.started:
        text = (
            "the log ends at NCCL's Init COMPLETE: if the processes still run, the first collective"
            " hangs; start once with NCCL_P2P_DISABLE=1 and run `fastverify doctor --probe`."
        )
        yield Finding("warn", "hang-after-init", text, "R25, R42")
    elif log.ends_at == "banner":
        text = (
            "the log ends at NCCL's version line: if the processes still run, NCCL hangs while it"
            " opens peer access; start once with NCCL_P2P_DISABLE=1."
        )
        yield Finding("warn", "hang-in-init", text, "R31, R41")


CHECKS = (graph_file, library, search, paths, errors, hang)
