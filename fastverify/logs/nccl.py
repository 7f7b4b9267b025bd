"""Parser for NCCL's debug output (NCCL_DEBUG=INFO, subsystems INIT, ENV, GRAPH, COLL)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec


class Search(msgspec.Struct, frozen=True):
    """Result of one graph search; pattern 4 is the ring. Bandwidths in GB/s as NCCL models them."""

    pattern: int
    channels: int
    intra_gbs: float
    inter_gbs: float
    intra_type: str
    inter_type: str


class Collective(msgspec.Struct, frozen=True):
    """The last collective a rank is known to have entered."""

    name: str
    count: int
    elements: int | None = None


class NcclLog(msgspec.Struct, frozen=True):
    """What NCCL said. environment: variables as NCCL understood them.

    transports: how many channel connections took which transport. forced: protocols that the
    matrix marks as enabled for AllReduce. last: by rank. shared_memory: (needed, allowed) bytes.
    ends_at: the text ends right behind NCCL's version line or its `Init COMPLETE`.
    """

    version: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    environment: dict[str, str] = {}
    searches: tuple[Search, ...] = ()
    transports: dict[str, int] = {}
    protocols: tuple[str, ...] = ()
    initialised: int = 0
    started: bool = False
    last: dict[int, Collective] = {}
    missing_device: int | None = None
    calloc_bytes: int | None = None
    shared_memory: tuple[int, int] | None = None
    shm_failed: bool = False
    host_fallback: bool = False
    ends_at: Literal["", "banner", "init"] = ""


_MARK = re.compile(r"NCCL (?:INFO|WARN|TRACE|VERSION|version)|WorkNCCL\(|ncclMaxSharedMem")
_PROCESS = re.compile(r"(\S{1,200}:\d+):\d+ \[\d+\] NCCL")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_ENV = re.compile(r"\b((?:NCCL|CUDA)_\w{1,60}) set by environment to (\S{1,300})")
_RANKS = re.compile(r"\brank (\d{1,5}) nranks (\d{1,5})")
_NODES = re.compile(r"\bnNodes (\d{1,5})")
_SEARCH = re.compile(
    r"Pattern (\d), .{0,40}?nChannels (\d{1,3}), bw (\d+(?:\.\d+)?)/(\d+(?:\.\d+)?), "
    r"type (\w+)/(\w+)"
)
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\].{0,40}? via (\S{1,60})")
_COLLECTIVE = re.compile(
    r"NCCL INFO (\w{4,20}): opCount ([0-9a-fA-F]{1,12}) .{0,200}? count (\d{1,15})"
    r"(?:.{0,200}?\[nranks=(\d{1,5})\])?"
)
_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w{1,40}), NumelIn=(\d{1,15})")
_WORK_RANK = re.compile(r"\[[Rr]ank ?(\d{1,5})\]")
_MATRIX = re.compile(r"^\s*AllReduce \|(.{10,80}?)\|", re.MULTILINE)
_MATRIX_HEAD = re.compile(r"^\s*Function \|([ \w]{6,80}?)\|", re.MULTILINE)
_DEVICE = re.compile(r"XML Import Channel : dev (\d{1,6}) not found")
_CALLOC = re.compile(r"Failed to CUDA calloc (\d{1,15}) bytes")
_SHARED = re.compile(r"ncclMaxSharedMem (\d{1,12}) exceeds .{0,40}?maxSharedMem (\d{1,12})")
_SHM = re.compile(
    r"Error while creating shared memory segment|failed to extend .{0,200} to \d+ byte"
)


def parse_nccl(text: str) -> NcclLog | None:
    """Read NCCL's lines out of any log; None when there are none."""
    named = (line[:2000] for line in text.split("\n") if "NCCL" in line or "nccl" in line)
    lines = [line for line in named if _MARK.search(line)]
    extra = _SHM.search(text) or _DEVICE.search(text) or _CALLOC.search(text)
    if not lines and not extra:
        return None
    joined = "\n".join(lines)
    sizes = [(int(m.group(1)), int(m.group(2))) for m in _RANKS.finditer(joined)]
    nodes = [int(m.group(1)) for m in _NODES.finditer(joined)]
    channels = Counter(_transport(m.group(1)) for m in _CHANNEL.finditer(joined))
    version, device = _VERSION.search(joined), _DEVICE.search(text)
    calloc, shared = _CALLOC.search(text), _SHARED.search(joined)
    return NcclLog(
        version=version.group(1) if version else None,
        ranks=max((size for _, size in sizes), default=None),
        nodes=max(nodes, default=None),
        environment={m.group(1): m.group(2).rstrip(".") for m in _ENV.finditer(joined)},
        searches=_searches(joined),
        transports=dict(channels),
        protocols=_protocols(text),
        initialised=joined.count("Init COMPLETE"),
        started=_COLLECTIVE.search(joined) is not None or _WORK.search(joined) is not None,
        last=_last(lines),
        missing_device=int(device.group(1)) if device else None,
        calloc_bytes=int(calloc.group(1)) if calloc else None,
        shared_memory=(int(shared.group(1)), int(shared.group(2))) if shared else None,
        shm_failed=_SHM.search(text) is not None,
        host_fallback="cuMem host allocations do not appear to be working" in text,
        ends_at=_ending(text),
    )


def _ending(text: str) -> Literal["", "banner", "init"]:
    """Where a log stops; a hang in NCCL shows as one of these lines being the last."""
    tail = [line for line in text[-20000:].split("\n") if line.strip()][-2:]
    if any("Init COMPLETE" in line for line in tail):
        return "init"
    return "banner" if tail and _VERSION.search(tail[-1]) else ""


def _searches(text: str) -> tuple[Search, ...]:
    found = {
        Search(int(p), int(n), float(a), float(b), intra, inter): None
        for p, n, a, b, intra, inter in (m.groups() for m in _SEARCH.finditer(text))
    }
    return tuple(found)


def _transport(word: str) -> str:
    for known in ("P2P/CUMEM", "P2P/IPC", "P2P/direct", "P2P/indirect", "SHM", "NVLS", "NET"):
        if word.startswith(known):
            return known
    return word.split("/")[0]


def _protocols(text: str) -> tuple[str, ...]:
    """Protocols with 1 in AllReduce's row; a 2 means that NCCL's own test still decides."""
    head, row = _MATRIX_HEAD.search(text), _MATRIX.search(text)
    if head is None or row is None:
        return ()
    names, cells = head.group(1).split(), row.group(1).split()
    return tuple(name for name, cell in zip(names, cells, strict=False) if cell == "1")


def _last(lines: Iterable[str]) -> dict[int, Collective]:
    """Last collective by rank, from COLL lines or from torch's watchdog.

    Only of the largest group: counts of several communicators cannot be compared, and their
    addresses differ between ranks.
    """
    ranks: dict[str, int] = {}
    last: dict[int, dict[int, Collective]] = {}
    for line in lines:
        process = _PROCESS.search(line)
        key = process.group(1) if process else ""
        if (known := _RANKS.search(line)) is not None and key:
            ranks.setdefault(key, int(known.group(1)))
        if (found := _COLLECTIVE.search(line)) is not None and key in ranks:
            name, count, elements, size = found.groups()
            group = last.setdefault(int(size or 0), {})
            group[ranks[key]] = Collective(name, int(count, 16), int(elements))
        elif (work := _WORK.search(line)) is not None:
            rank = _WORK_RANK.search(line)
            if rank is not None:
                count, name, elements = work.groups()
                group = last.setdefault(0, {})
                group[int(rank.group(1))] = Collective(name, int(count), int(elements))
    return last[max(last)] if last else {}
