"""Facts about the running machine that `Machine` does not hold; nothing here needs root.

What root alone may read comes back as unknown, with the command that reads it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from fastverify.checks import installed_versions
from fastverify.comm.nccl_graph import read_graph_file
from fastverify.comm.nccl_values import user_environment
from fastverify.doctor import hosttext
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.hosttext import SURPRISE_DOWN, Bridge, KernelLog
from fastverify.errors import ConfigError
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.machine.probe import read_machine

COMMAND_SECONDS = 5.0
_EXTENDED, _ACS, _EXPRESS = 0x100, 0x0D, 0x10
_REDIRECTS = 0x04 | 0x08
_PORTS = {4: "Root Port", 5: "Upstream Port", 6: "Downstream Port"}


def read_live(environ: Mapping[str, str], root: Path = Path("/")) -> Evidence:
    """Evidence of this machine, in well under a second plus one run of dmesg."""
    machine = read_machine(root, environ=environ)
    installed = None
    if machine.visible is not None and len(machine.gpus) < machine.installed:
        everything = {k: v for k, v in environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        installed = read_machine(root, environ=everything)
    settings = user_environment(environ, root)
    notes = [*_stale_peer_test(root, environ)]
    graph = None
    if settings.get("NCCL_GRAPH_FILE"):
        try:
            graph = read_graph_file(settings["NCCL_GRAPH_FILE"])
        except ConfigError as error:
            notes.append(Finding("fail", "graph-file-xml", str(error), "R79"))
    kernel, hidden = _kernel(machine, root)
    if hidden and machine.gpus:
        text = (
            "the kernel's messages are hidden from this user; run `sudo dmesg > FILE` and"
            " `fastverify logs FILE`."
        )
        notes.append(Finding("unknown", "kernel-log-unread", text, "R118"))
    return Evidence(
        machine=machine,
        installed=installed,
        complete=True,
        environ=settings,
        graph_text=graph,
        bridges=read_bridges(machine, root),
        kernel=kernel,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        versions={**installed_versions(), "python": platform.python_version()},
        notes=tuple(notes),
    )


def read_bridges(machine: Machine, root: Path) -> tuple[Bridge, ...] | None:
    """ACS of the bridges above the GPUs from their configuration space; None when hidden."""
    found = []
    for address in sorted({a for gpu in machine.gpus for a in gpu.upstream}):
        try:
            data = (root / "sys/bus/pci/devices" / address / "config").read_bytes()
        except OSError:
            data = b""
        if len(data) > 0x40:
            found.append(Bridge(address, _port(data), acs_redirects(data)))
    return tuple(found) if any(bridge.redirects is not None for bridge in found) else None


def acs_redirects(config: bytes) -> bool | None:
    """Whether ACS in a PCI configuration space redirects requests or completions to the root.

    None when the extended part is missing: users without root see the first 64 bytes. False when
    the bridge has no ACS. (PCI Express specification: extended capability 0x0D, control word at 6.)
    """
    if len(config) < _EXTENDED + 8:
        return None
    offset, seen = _EXTENDED, set()
    while offset >= _EXTENDED and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[offset + 6 : offset + 8], "little") & _REDIRECTS)
        offset = header >> 20
    return False


def _port(config: bytes) -> str:
    offset, seen = config[0x34], set()
    while offset and offset not in seen and offset + 4 <= len(config):
        seen.add(offset)
        if config[offset] == _EXPRESS:
            return _PORTS.get(config[offset + 2] >> 4, "bridge")
        offset = config[offset + 1]
    return "bridge"


def _kernel(machine: Machine, root: Path) -> tuple[KernelLog | None, bool]:
    """Kernel messages, or the error counters in sysfs where those are hidden."""
    text = _dmesg() if root == Path("/") else None
    log = hosttext.parse_kernel_log(text) if text else None
    corrected, down = _error_counters(machine, root)
    if log is not None:
        return msgspec.structs.replace(log, corrected=max(log.corrected, corrected)), False
    counted = KernelLog(corrected=corrected, uncorrectable=(SURPRISE_DOWN,) if down else ())
    return (counted if counted != KernelLog() else None), text is None


def _dmesg() -> str | None:
    program = shutil.which("dmesg")
    if program is None:
        return None
    try:
        done = subprocess.run([program], capture_output=True, timeout=COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")


def _error_counters(machine: Machine, root: Path) -> tuple[int, int]:
    """(corrected errors, surprise downs) of the GPUs and the bridges above them."""
    corrected = down = 0
    for gpu in machine.gpus:
        for address in (*gpu.upstream, gpu.pci_address):
            if address is None:
                continue
            device = root / "sys/bus/pci/devices" / address
            corrected += _counter(device / "aer_dev_correctable", "TOTAL_ERR_COR")
            down += _counter(device / "aer_dev_fatal", "SDES")
    return corrected, down


def _counter(path: Path, name: str) -> int:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(rf"\b{name} (\d{{1,12}})", text)
    return int(found.group(1)) if found else 0


def _stale_peer_test(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Peer test results of SGLang and vLLM from before the last boot."""
    try:
        stat = (root / "proc/stat").read_text(errors="replace")
    except OSError:
        return
    booted = re.search(r"^btime (\d+)", stat, re.MULTILINE)
    home = environ.get("HOME")
    if booted is None or not home:
        return
    for engine in ("sglang", "vllm"):
        for path in sorted(
            (Path(home) / ".cache" / engine).glob("gpu_p2p_access_cache_for_*.json")
        ):
            if path.stat().st_mtime < int(booted.group(1)):
                text = (
                    f"~/.cache/{engine}/{path.name} holds a peer test from before the last boot and"
                    " is keyed by the device list alone; delete it after any change of BIOS, driver"
                    " or kernel options."
                )
                yield Finding("warn", "cache-stale", text, "R115")
