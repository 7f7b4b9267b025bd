"""Reads this machine: NVML for the GPUs, procfs and sysfs for the rest; no torch, no commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from fastverify.machine import host, nvml
from fastverify.machine.facts import UNKNOWN_LINK, Gpu, Machine
from fastverify.machine.nccl_library import NcclLibrary, read_nccl
from fastverify.machine.nvml import GpuFacts, read_gpus

# Values that say nothing, where an empty kernel command line says something.
_EMPTY = (("numa_nodes", ()), ("virtualisation", "unknown"))
_DRIVER_FACTS = {"registry_dwords", "resizable_bar", "driver_flavour"}


def read_machine(
    root: Path = Path("/"),
    nvml_module: Any = None,
    environ: Mapping[str, str] | None = None,
    nccl: NcclLibrary | None = None,
) -> Machine:
    """The facts of this machine; it takes well under a second and never fails for a missing part.

    `root` holds `proc`, `sys` and `dev`; `nvml_module` stands in for pynvml, `environ` for the
    process environment (pass one without CUDA_VISIBLE_DEVICES to see every GPU), `nccl` for the
    library found. What cannot be read is None and listed in `unknown`.
    """
    environ = os.environ if environ is None else environ
    gpus = read_gpus(pynvml if nvml_module is None else nvml_module, root, environ)
    library = read_nccl(environ) if nccl is None else nccl
    facts = host.read_host(root)
    driver_version = gpus.driver_version or facts.pop("driver_version")
    facts.pop("driver_version", None)
    return Machine(
        gpus=gpus.gpus,
        installed=gpus.installed,
        visible=gpus.visible,
        nvml_error=gpus.error,
        links=gpus.links,
        p2p_read=gpus.p2p_read,
        p2p_write=gpus.p2p_write,
        driver_version=driver_version,
        cuda_driver_version=gpus.cuda_driver_version,
        nccl_version=library.version,
        nccl_origin=library.origin,
        nccl_packages=library.packages,
        unknown=_unknown(facts, gpus, library),
        **facts,
    )


def _unknown(facts: Mapping[str, Any], gpus: GpuFacts, library: NcclLibrary) -> tuple[str, ...]:
    # Without a driver its files are absent rather than unread.
    driverless = gpus.error is not None and facts["driver_flavour"] is None
    skipped = _DRIVER_FACTS if driverless else set()
    lines = [
        f"{name}: {command}"
        for name, command in host.COMMANDS.items()
        if name not in skipped and (facts[name] is None or (name, facts[name]) in _EMPTY)
    ]
    if gpus.error is not None:
        lines.append("gpus: nvidia-smi -L")
    for name, command in nvml.COMMANDS.items():
        if name in Gpu.__struct_fields__:
            missing = [str(gpu.index) for gpu in gpus.gpus if getattr(gpu, name) is None]
            if missing:
                lines.append(f"{name} of GPU {','.join(missing)}: {command}")
        elif _unread(getattr(gpus, name), len(gpus.gpus)):
            lines.append(f"{name}: {command}")
    if library.version is None:
        lines.append("nccl_version: NCCL_DEBUG=VERSION on any NCCL program")
    return tuple(lines)


def _unread(matrix: tuple[tuple[str, ...], ...], count: int) -> bool:
    return count > 1 and (not matrix or any(UNKNOWN_LINK in row for row in matrix))
