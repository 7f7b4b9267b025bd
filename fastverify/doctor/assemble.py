"""One machine from texts that were recorded apart from each other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fastverify.doctor import smi
from fastverify.errors import ConfigError
from fastverify.logs.text import to_number
from fastverify.machine.facts import UNKNOWN_LINK, Gpu, Machine, Matrix, Virtualisation

_COLUMNS = {
    "pcie_gen": ("pcie.link.gen.current", "pcie.link.gen.gpucurrent"),
    "pcie_gen_max": ("pcie.link.gen.max", "pcie.link.gen.gpumax"),
    "pcie_width": ("pcie.link.width.current",),
    "pcie_width_max": ("pcie.link.width.max",),
}
_LABELS = {
    "pcie_gen": ("pcie generation/device current", "pcie generation/current"),
    "pcie_gen_max": ("pcie generation/device max", "pcie generation/max"),
    "pcie_width": ("link width/current",),
    "pcie_width_max": ("link width/max",),
}


class Pieces(msgspec.Struct):
    """Parsed texts of one machine, filled in as files are read."""

    links: Matrix = ()
    numa: tuple[int | None, ...] = ()
    p2p_read: Matrix = ()
    p2p_write: Matrix = ()
    smi: smi.Smi | None = None
    rows: tuple[Mapping[str, str], ...] = ()
    keys: dict[str, str] | None = None
    resizable_bar: bool | None = None
    cmdline: tuple[str, ...] | None = None
    virtualisation: Virtualisation = "unknown"


def assemble(pieces: Pieces, base: Machine | None = None) -> Machine | None:
    """The machine the pieces describe, laid over `base`; None when there is no piece.

    Raises ConfigError when two of them are about different numbers of GPUs.
    """
    if pieces == Pieces():
        return base
    gpus = _gpus(pieces, base)
    count = len(gpus)
    start = base or Machine()
    changes: dict[str, object] = {"gpus": gpus, "installed": max(start.installed, count)}
    for field in ("links", "p2p_read", "p2p_write"):
        matrix = getattr(pieces, field)
        if matrix:
            changes[field] = matrix
    if count > 1 and not (pieces.links or start.links):
        changes["links"] = _unknown_links(count)
    if pieces.keys is not None:
        changes |= {"registry_dwords": pieces.keys, "resizable_bar": pieces.resizable_bar}
    if pieces.cmdline is not None:
        changes["kernel_cmdline"] = pieces.cmdline
    if pieces.virtualisation != "unknown":
        changes["virtualisation"] = pieces.virtualisation
    if pieces.smi is not None:
        changes |= {
            "driver_version": pieces.smi.driver or start.driver_version,
            "cuda_driver_version": pieces.smi.cuda or start.cuda_driver_version,
        }
    return msgspec.structs.replace(start, **changes)


def _gpus(pieces: Pieces, base: Machine | None) -> tuple[Gpu, ...]:
    counts = {
        "nvidia-smi topo -m": len(pieces.links),
        "nvidia-smi topo -p2p r": len(pieces.p2p_read),
        "nvidia-smi topo -p2p w": len(pieces.p2p_write),
        "nvidia-smi -q": len(pieces.smi.gpus) if pieces.smi else 0,
        "nvidia-smi --query-gpu": len(pieces.rows),
        "the machine file": len(base.gpus) if base else 0,
    }
    known = {name: count for name, count in counts.items() if count}
    if len(set(known.values())) > 1:
        text = " and ".join(f"{name} {count}" for name, count in known.items())
        raise ConfigError(
            f"the files are about different machines, GPUs in {text}; give files of one machine."
        )
    count = next(iter(known.values()), 0)
    gpus = (
        list(base.gpus) if base and base.gpus else [Gpu(i, "unreadable GPU") for i in range(count)]
    )
    for index, node in enumerate(pieces.numa):
        if node is not None:
            gpus[index] = msgspec.structs.replace(gpus[index], numa_node=node)
    if pieces.smi is not None:
        gpus = [_from_query(gpu, block) for gpu, block in zip(gpus, pieces.smi.gpus, strict=True)]
    if pieces.rows:
        gpus = [_from_csv(gpu, row) for gpu, row in zip(gpus, pieces.rows, strict=True)]
    return tuple(gpus)


def _from_query(gpu: Gpu, block: Mapping[str, str]) -> Gpu:
    display = smi.first(block, "display attached", "display active")
    found: dict[str, object] = {
        "name": smi.first(block, "product name"),
        "memory_bytes": smi.mib(smi.first(block, "fb memory usage/total")),
        "bar1_bytes": smi.mib(smi.first(block, "bar1 memory usage/total")),
        "display_active": None if display is None else display.lower() in ("yes", "enabled"),
    }
    for field, labels in _LABELS.items():
        number = to_number(smi.first(block, *(f"{label}" for label in labels)))
        found[field] = None if number is None else int(number)
    return _laid_over(gpu, found)


def _from_csv(gpu: Gpu, row: Mapping[str, str]) -> Gpu:
    found: dict[str, object] = {"name": smi.column(row, ("name", "gpu_name"))}
    for field, names in _COLUMNS.items():
        number = to_number(smi.column(row, names))
        found[field] = None if number is None else int(number)
    capability = (smi.column(row, ("compute_cap",)) or "").split(".")
    if len(capability) == 2 and all(part.isdecimal() for part in capability):
        found["compute_capability"] = (int(capability[0]), int(capability[1]))
    return _laid_over(gpu, found)


def _laid_over(gpu: Gpu, found: Mapping[str, object]) -> Gpu:
    known = {field: value for field, value in found.items() if value is not None}
    return msgspec.structs.replace(gpu, **known)


def _unknown_links(count: int) -> Matrix:
    return tuple(tuple("X" if i == j else UNKNOWN_LINK for j in range(count)) for i in range(count))
