"""How the GPUs of one group are joined: a pure function of the machine's facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from fastverify.errors import ConfigError
from fastverify.machine.facts import UNKNOWN_LINK, Machine, Matrix, select, socket_of

LEVELS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


class Kind(StrEnum):
    """The shape of a group of GPUs, which is what recommendations are keyed on."""

    NONE = "none"
    SINGLE = "single"
    NVLINK = "nvlink"
    """Every pair has NVLink."""
    ONE_SWITCH = "one_switch"
    TWO_SWITCHES = "two_switches"
    """Two equal groups, each behind its own PCIe switch; `sockets` says over how many CPUs."""
    ONE_SOCKET = "one_socket"
    """Root ports of one CPU, no switch."""
    TWO_SOCKETS = "two_sockets"
    """Root ports of two CPUs, no switch."""
    ISLANDS = "islands"
    """Three or more equal groups, or equal NVLink groups joined by PCIe."""
    MIXED = "mixed"
    """No regular shape: groups of unequal size, or NVLink on some pairs only."""
    VM = "vm"
    """A guest: what it shows of PCIe is not evidence."""
    UNKNOWN = "unknown"
    """The link matrix could not be read."""


class Topology(msgspec.Struct, frozen=True):
    """The shape of the first `ranks` GPUs of a machine.

    `islands` groups ranks (CUDA device numbers) joined by a PCIe switch or NVLink, else by CPU
    socket, else by NUMA node; empty below two ranks and when unknown or not believable.
    `best_link` and `worst_link` are levels of `LEVELS` over all pairs, None without a pair or with
    an unread one. `switches` counts PCIe switch groups of two or more GPUs. `sockets` is how many
    CPU sockets the ranks hang on, None when unknown. `granted` is the driver's peer answer over
    all ordered pairs, read and write; None when it was not read. `sm120` means that every GPU has
    compute capability 12.x. `adjacent` is False when an island's ranks are not numbered in a row.
    """

    kind: Kind
    ranks: int
    islands: tuple[tuple[int, ...], ...] = ()
    best_link: str | None = None
    worst_link: str | None = None
    switches: int = 0
    sockets: int | None = None
    granted: bool | None = None
    sm120: bool = False
    mixed_models: bool = False
    adjacent: bool = True


def level_of(link: str) -> str:
    """The level of a matrix code: NV4 and NV18 are both NV."""
    return "NV" if link.startswith("NV") else link


def classify(machine: Machine, tp: int) -> Topology:
    """Classify the first `tp` GPUs, or all of them when there are fewer.

    Raises ConfigError for tp below 1. Whether too few GPUs are an error is the caller's decision.
    """
    if tp < 1:
        raise ConfigError(f"tensor parallel size is {tp}, it must be at least 1.")
    group = select(machine, tuple(range(min(tp, len(machine.gpus)))))
    ranks = len(group.gpus)
    pairs = [level_of(group.links[i][j]) for i in range(len(group.links)) for j in range(i)]
    known = ranks > 1 and bool(pairs) and UNKNOWN_LINK not in pairs
    kind, islands = _shape(group, pairs) if known else (_without_links(group), ())
    sockets = {socket_of(group, gpu) for gpu in group.gpus}
    return Topology(
        kind=kind,
        ranks=ranks,
        islands=islands,
        best_link=min(pairs, key=LEVELS.index) if known else None,
        worst_link=max(pairs, key=LEVELS.index) if known else None,
        switches=_switches(group) if known and kind is not Kind.VM else 0,
        sockets=len(sockets) if sockets and None not in sockets else None,
        granted=_granted(group),
        sm120=ranks > 0 and all((g.compute_capability or (0,))[0] == 12 for g in group.gpus),
        mixed_models=len({(g.name, g.compute_capability) for g in group.gpus}) > 1,
        adjacent=all(i[-1] - i[0] == len(i) - 1 for i in islands),
    )


def rank_order(topology: Topology) -> tuple[int, ...]:
    """An order of the ranks that keeps each island in a row."""
    return tuple(rank for island in topology.islands for rank in island)


def _without_links(group: Machine) -> Kind:
    if len(group.gpus) < 2:
        return Kind.SINGLE if group.gpus else Kind.NONE
    return Kind.VM if group.virtualisation in ("vm", "wsl") else Kind.UNKNOWN


def _shape(group: Machine, pairs: Sequence[str]) -> tuple[Kind, tuple[tuple[int, ...], ...]]:
    everyone = (tuple(range(len(group.gpus))),)
    # NVLink is reported by the GPUs themselves, so a hypervisor cannot misstate it.
    if set(pairs) == {"NV"}:
        return Kind.NVLINK, everyone
    if group.virtualisation in ("vm", "wsl"):
        return Kind.VM, ()
    close = _groups(group.links, lambda level: LEVELS.index(level) <= LEVELS.index("PXB"))
    if "NV" in pairs:
        return (Kind.ISLANDS if len(close) > 1 and _equal(close) else Kind.MIXED), close
    if len(close) == 1:
        return Kind.ONE_SWITCH, close
    if len(close) == len(group.gpus):
        return _by_socket(group)
    if not _equal(close):
        return Kind.MIXED, close
    return (Kind.TWO_SWITCHES if len(close) == 2 else Kind.ISLANDS), close


def _by_socket(group: Machine) -> tuple[Kind, tuple[tuple[int, ...], ...]]:
    sockets = [socket_of(group, gpu) for gpu in group.gpus]
    if None in sockets:
        islands = _groups(group.links, lambda level: level != "SYS")
    else:
        distinct = sorted({socket for socket in sockets if socket is not None})
        islands = tuple(
            tuple(rank for rank, socket in enumerate(sockets) if socket == one) for one in distinct
        )
    if len(islands) <= 2:
        return (Kind.ONE_SOCKET if len(islands) == 1 else Kind.TWO_SOCKETS), islands
    return (Kind.ISLANDS if _equal(islands) else Kind.MIXED), islands


def _groups(links: Matrix, joined: Callable[[str], bool]) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = []
    for rank, row in enumerate(links):
        touching = [g for g in groups if any(joined(level_of(row[member])) for member in g)]
        groups = [g for g in groups if g not in touching]
        groups.append(sorted(member for g in touching for member in g) + [rank])
    return tuple(sorted(tuple(g) for g in groups))


def _equal(groups: Sequence[Sequence[int]]) -> bool:
    return len({len(group) for group in groups}) == 1 and len(groups[0]) > 1


def _switches(group: Machine) -> int:
    return sum(len(g) > 1 for g in _groups(group.links, lambda level: level in ("PIX", "PXB")))


def _granted(group: Machine) -> bool | None:
    if len(group.gpus) < 2 or not group.p2p_read or not group.p2p_write:
        return None
    cells = [
        matrix[i][j]
        for matrix in (group.p2p_read, group.p2p_write)
        for i in range(len(group.gpus))
        for j in range(len(group.gpus))
        if i != j
    ]
    return all(cell == "OK" for cell in cells)
