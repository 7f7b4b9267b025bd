"""Checks of peer access: what the driver grants, what the probe saw, and what hints at why."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.doctor.evidence import Evidence, pairs_text
from fastverify.machine.facts import UNKNOWN_LINK, Gpu, Machine, forced_p2p, iommu_translates
from fastverify.machine.finding import Finding
from fastverify.machine.topology import LEVELS, Kind, classify, level_of

_CODES = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a driver key",
    "NS": "not supported",
}
_MOST_PEERS = 8
_GUESTS = ("vm", "wsl")
Pairs = list[tuple[int, int]]


def grants(evidence: Evidence) -> Iterator[Finding]:
    """Pairs that the driver refuses; a normal state for GeForce cards, never a crash."""
    machine = evidence.machine
    if machine is None or evidence.ranks < 2:
        return
    refused: dict[str, Pairs] = {}
    for matrix in (machine.p2p_read, machine.p2p_write):
        for i, j in _others(matrix):
            if matrix[i][j] not in ("OK", "U"):
                refused.setdefault(matrix[i][j], []).append((i, j))
    consumer = all("GeForce" in gpu.name for gpu in machine.gpus)
    for code, pairs in refused.items():
        text = (
            f"the driver refuses peer access for {pairs_text(pairs)} ({code}:"
            f" {_CODES.get(code, 'its own code')}), so collectives between them are staged in host"
            " memory; no peer kernel will be used there."
        )
        yield Finding("info" if consumer else "warn", "peers-refused", text, "R56, facts 7")
    if evidence.complete and not evidence.measured.probe and not refused:
        text = (
            "a driver's grant is not a test of delivery and the peers of this machine were not"
            " probed; run `fastverify doctor --probe`."
        )
        yield Finding("unknown", "peers-unproved", text, "R25")


def delivery(evidence: Evidence) -> Iterator[Finding]:
    """What the destination-verified probe saw, by kind of failure."""
    failed = _failed(evidence)
    stay = "serve on NCCL with NCCL_P2P_DISABLE=1 and no peer kernel, as fastverify does by itself"
    granted = "although the driver grants peer access" if _granted(evidence) else "in the probe"
    words = {
        "timeout": ("peers-not-delivered", f"writes never arrive {granted}"),
        "wrong": ("peers-wrong-data", f"writes arrive with wrong data {granted}"),
        "unmappable": ("peers-not-mappable", f"the peer's memory cannot be mapped {granted}"),
    }
    for cell, (code, what) in words.items():
        pairs = [pair for pair, seen in failed.items() if seen == cell]
        if pairs:
            text = f"{pairs_text(pairs)}: {what}; {stay}."
            yield Finding("fail", code, text, "R25, R32, R44, R46")
    if evidence.peers is True:
        count = len(evidence.measured.probe)
        text = f"every ordered pair of {count} GPUs delivered what was written to it in the probe."
        yield Finding("info", "peers-proved", text, "R25")


def causes(evidence: Evidence) -> Iterator[Finding]:
    """Where to look after a failed probe, the likeliest first."""
    failed = list(_failed(evidence))
    machine = evidence.machine
    if not failed or machine is None:
        return
    yield from _close_pairs(machine, failed)
    shown = [i for i, gpu in enumerate(machine.gpus) if gpu.display_active]
    for position in shown:
        if all(position in pair for pair in failed):
            text = (
                f"only pairs with GPU {position} fail and a display is attached to it; run the"
                " machine headless or move the display to another card."
            )
            yield Finding("warn", "peers-display", text, "R33")
    yield from _last_step(evidence, machine)


def _close_pairs(machine: Machine, failed: Pairs) -> Iterator[Finding]:
    if not machine.links or len(machine.links) < 2:
        return
    close = [p for p in _others(machine.links) if machine.links[p[0]][p[1]] in ("PIX", "PXB")]
    far = [p for p in _others(machine.links) if p not in close]
    if close and far and set(failed) & set(close) and not set(failed) & set(far):
        text = (
            f"{pairs_text(failed)} fail behind a common switch while pairs farther apart work,"
            " which never used peer access; clear ACS on the switch, or turn VT-d or the IOMMU off."
        )
        yield Finding("warn", "close-pairs-fail", text, "R37")
    passing = [
        level
        for level in LEVELS
        if any(level_of(machine.links[i][j]) == level for i, j in _others(machine.links))
        and not any(_within(machine, pair, level) for pair in failed)
    ]
    if passing:
        widest = {"NODE": "PHB", "NV": "NVL"}.get(passing[-1], passing[-1])
        text = (
            f"all pairs up to {passing[-1]} passed the probe; NCCL_P2P_LEVEL={widest} keeps peer"
            " access for them and stages the others."
        )
        yield Finding("info", "p2p-level-widest", text, "R41")


def _within(machine: Machine, pair: tuple[int, int], level: str) -> bool:
    link = level_of(machine.links[pair[0]][pair[1]])
    return link == UNKNOWN_LINK or LEVELS.index(link) <= LEVELS.index(level)


def _last_step(evidence: Evidence, machine: Machine) -> Iterator[Finding]:
    keys = machine.registry_dwords
    covered = all(_covers(gpu) for gpu in machine.gpus)
    if keys is not None and covered and "RMForceStaticBar1" not in keys:
        text = (
            "BAR1 covers the memory and RMForceStaticBar1 is unset; as a last step after IOMMU and"
            " ACS, patched drivers on RTX 50 cards work with"
            ' NVreg_RegistryDwords="RMForceStaticBar1=1;PeerMappingOverride=1".'
        )
        yield Finding("info", "static-bar1", text, "R31")
    if evidence.kernel and evidence.kernel.misaligned:
        address, step = evidence.kernel.misaligned
        text = (
            f"the kernel refused the peer mapping at {address}, which is not aligned to {step}; it"
            " needs a driver patch, and no setting here helps."
        )
        yield Finding("warn", "bar1-alignment", text, "R32")


def bar1(evidence: Evidence) -> Iterator[Finding]:
    """BAR1 against memory: needed for peer mappings of the BAR1 kind, and not enough."""
    machine = evidence.machine
    if machine is None or len(machine.gpus) < 2:
        return
    small = [gpu for gpu in machine.gpus if not _covers(gpu) and gpu.bar1_bytes is not None]
    if not small:
        return
    sizes = f"{(small[0].bar1_bytes or 0) >> 20} MiB for {(small[0].memory_bytes or 0) >> 20} MiB"
    who = f"GPU {', '.join(str(gpu.index) for gpu in small[:8])}"
    if machine.virtualisation in _GUESTS:
        text = f"BAR1 of {who} reads {sizes}, which a guest cannot judge; read it on the host."
        yield Finding("unknown", "bar1-untrusted", text, "R34")
    elif (small[0].bar1_bytes or 0) > 1 << 30:
        text = (
            f"BAR1 of {who} is {sizes} of memory, too small for peer mappings, as on cards whose"
            " memory was enlarged; serve on NCCL without peer access."
        )
        yield Finding("warn", "bar1-small", text, "R34")
    else:
        text = (
            f"BAR1 of {who} is {sizes} of memory; switch on Above 4G Decoding and Resizable BAR in"
            " the firmware."
        )
        yield Finding("warn", "bar1-small", text, "R34")


def guests(evidence: Evidence) -> Iterator[Finding]:
    """Virtual machines and WSL, where PCIe readings are not evidence."""
    kind = evidence.machine.virtualisation if evidence.machine else "unknown"
    if kind == "wsl":
        text = (
            "this is WSL, where GPU memory cannot be shared by IPC and decode was half as fast as"
            " on native Linux; peer kernels stay off, use native Linux."
        )
        yield Finding("warn", "wsl", text, "R121")
    elif kind == "vm" and evidence.ranks > 1:
        text = (
            "this is a virtual machine: its BAR, ACS and IOMMU readings say nothing about the host;"
            " peer access stays off until `fastverify doctor --probe` passes."
        )
        yield Finding("info", "vm", text, "facts 10")


def group_shape(evidence: Evidence) -> Iterator[Finding]:
    """Groups that no fused kernel can serve: too many peers, several hosts, mixed cards."""
    hosts = max(evidence.measured.hosts or 1, (evidence.nccl.nodes if evidence.nccl else 1) or 1)
    if hosts > 1:
        text = (
            f"the group spans {hosts} hosts: no memory is mapped across them, so every all-reduce"
            " goes through NCCL and no graph file may be used; verify is captured as usual."
        )
        yield Finding("info", "several-hosts", text, "R119")
    if evidence.machine is None:
        return
    if evidence.ranks > _MOST_PEERS:
        text = (
            f"{evidence.ranks} ranks are more than the {_MOST_PEERS} peers that CUDA maps in one"
            " process: all-reduces go through NCCL; two groups of 8 are usually faster."
        )
        yield Finding("info", "peers-too-many", text, "R64")
    topology = classify(evidence.machine, max(1, evidence.ranks))
    if topology.mixed_models and topology.kind is not Kind.NONE:
        names = " and ".join(sorted({gpu.name for gpu in evidence.machine.gpus[: evidence.ranks]}))
        text = (
            f"one group mixes {names}: fused kernels stay off and the slowest card sets the pace;"
            " use equal cards in one group."
        )
        yield Finding("warn", "gpu-mixed", text, "R52")


def driver_keys(evidence: Evidence) -> Iterator[Finding]:
    """The keys that stop peer loads and stores from being staged on root ports."""
    machine = evidence.machine
    if machine is None or evidence.ranks < 2 or machine.virtualisation in _GUESTS:
        return
    topology = classify(machine, evidence.ranks)
    on_ports = topology.kind in (Kind.ONE_SOCKET, Kind.TWO_SOCKETS) and not topology.switches
    forced = forced_p2p(machine)
    if forced:
        text = "the driver keys that force peer access are in force (ForceP2P in RegistryDwords)."
        yield Finding("info", "driver-keys", text, "R116")
    elif on_ports and topology.granted is not False and not _consumer(machine):
        if forced is False:
            text = (
                "the GPUs hang on CPU root ports and RegistryDwords holds no ForceP2P: peer loads"
                " are staged through host memory, 242 us instead of 16 for 114 KB in one report;"
                " see the driver keys in the documentation, and undo them if the probe then fails."
            )
            yield Finding("warn", "forced-p2p-off", text, "R83, R97")
        elif evidence.complete:
            text = (
                "whether the driver stages peer loads on root ports is unknown; check `grep"
                " RegistryDwords /proc/driver/nvidia/params`."
            )
            yield Finding("unknown", "driver-keys-unknown", text, "R83")


def iommu(evidence: Evidence) -> Iterator[Finding]:
    """A translating IOMMU, where NCCL's rules do not report it (they ask for the environment)."""
    machine = evidence.machine
    if machine is None or evidence.ranks < 2 or machine.virtualisation in _GUESTS:
        return
    if iommu_translates(machine) and evidence.peers is not True:
        text = (
            "the IOMMU translates GPU addresses, so peer writes can vanish without an error; boot"
            " with iommu=pt and run `fastverify doctor --probe`."
        )
        yield Finding("warn", "iommu-translates", text, "R44, R97")


def _consumer(machine: Machine) -> bool:
    return all("GeForce" in gpu.name for gpu in machine.gpus)


def _covers(gpu: Gpu) -> bool:
    """Whether BAR1 spans the memory; cards report the memory less what firmware keeps."""
    return bool(gpu.bar1_bytes and gpu.memory_bytes and gpu.bar1_bytes >= gpu.memory_bytes)


def _granted(evidence: Evidence) -> bool:
    machine = evidence.machine
    matrices = (machine.p2p_read, machine.p2p_write) if machine else ()
    known = [matrix for matrix in matrices if matrix]
    return bool(known) and all(m[i][j] == "OK" for m in known for i, j in _others(m))


def _failed(evidence: Evidence) -> dict[tuple[int, int], str]:
    probe = evidence.measured.probe
    return {
        (i, j): probe[i][j] for i, j in _others(probe) if probe[i][j] not in ("ok", "unread", "-")
    }


def _others(matrix: tuple[tuple[str, ...], ...]) -> list[tuple[int, int]]:
    size = range(len(matrix))
    return [(i, j) for i in size for j in size if i != j]


CHECKS = (grants, delivery, causes, bar1, guests, group_shape, driver_keys, iommu)
