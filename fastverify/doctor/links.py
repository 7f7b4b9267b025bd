"""Checks of the PCIe fabric: widths, ACS, link errors, binding, order."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fastverify.doctor.evidence import Evidence, pairs_text
from fastverify.doctor.hosttext import SURPRISE_DOWN
from fastverify.machine.facts import Gpu, Machine, iommu_translates
from fastverify.machine.finding import Finding, Severity
from fastverify.machine.topology import Kind, classify, level_of

OUTLIER = 0.75
MANY_CORRECTED = 100
_XIDS: dict[int, tuple[Severity, str]] = {
    13: ("warn", "a kernel raised an exception"),
    31: ("warn", "a kernel touched memory that is not mapped"),
    43: ("warn", "a kernel of a program failed"),
    48: ("fail", "the memory has an error that cannot be corrected"),
    74: ("fail", "NVLink failed"),
    79: ("fail", "the GPU fell off the bus, so check power, riser and cable"),
    94: ("warn", "a memory error was contained in one program"),
    95: ("fail", "a memory error spread, so the GPU needs a reset"),
    119: ("fail", "the GPU's system processor stopped, so reboot"),
    120: ("fail", "the GPU's system processor stopped, so reboot"),
}


def widths(evidence: Evidence) -> Iterator[Finding]:
    """Slots narrower than the card, or than the others' slots."""
    gpus = evidence.machine.gpus if evidence.machine else ()
    widest = max((gpu.pcie_width or 0 for gpu in gpus), default=0)
    for gpu in gpus:
        most = max(gpu.pcie_width_max or 0, widest if len(gpus) > 1 else 0)
        if gpu.pcie_width and gpu.pcie_width < most and len(gpus) > 1:
            text = (
                f"GPU {gpu.index} runs {gpu.pcie_width} of {most} PCIe lanes and slows every"
                " all-reduce of its group down; move it to another slot or check riser and cable."
            )
            yield Finding("warn", "pcie-narrow", text, "R94")


def generations(evidence: Evidence) -> Iterator[Finding]:
    """Link speeds below the best: a fault under load, no evidence on an idle card."""
    gpus = evidence.machine.gpus if evidence.machine else ()
    if len(gpus) < 2:
        return
    busy = {s.gpu for s in evidence.samples if (s.util_percent or 0) > 50}
    slow = [g for g in gpus if g.pcie_gen and g.pcie_gen_max and g.pcie_gen < g.pcie_gen_max]
    loaded = [gpu for gpu in slow if gpu.index in busy]
    if loaded:
        text = (
            f"GPU {_list(loaded)} runs PCIe generation {loaded[0].pcie_gen} of"
            f" {loaded[0].pcie_gen_max} under load; check the slot, riser and cable, or lock the"
            " generation in the firmware."
        )
        yield Finding("warn", "pcie-slow", text, "R94")
    idle = [gpu for gpu in slow if gpu not in loaded]
    if idle:
        shown = ", ".join(
            f"{g.index} (generation {g.pcie_gen} of {g.pcie_gen_max})" for g in idle[:8]
        )
        text = (
            f"the PCIe link of GPU {shown} reads below its best, as on an idle card; read"
            " pcie.link.gen.current again under load."
        )
        yield Finding("unknown", "pcie-idle", text, "R94")


def acs(evidence: Evidence) -> Iterator[Finding]:
    """Bridges above the GPUs that send peer traffic up to the root."""
    machine = evidence.machine
    bridges = evidence.bridges
    if bridges is None:
        if evidence.complete and machine is not None and _acs_matters(evidence, machine):
            text = (
                "whether PCIe bridges redirect peer traffic (ACS) is unknown without root; check"
                " `sudo lspci -vv | grep -E '^[0-9a-f]|ACSCtl'`."
            )
            yield Finding("unknown", "acs-unknown", text, "R87")
        return
    above = {address for gpu in machine.gpus for address in gpu.upstream} if machine else set()
    ours = [bridge for bridge in bridges if not above or bridge.address in above]
    redirecting = [bridge for bridge in ours if bridge.redirects]
    if redirecting:
        names = ", ".join(f"{b.port.lower()} {b.address}" for b in redirecting[:4])
        more = f" and {len(redirecting) - 4} more" if len(redirecting) > 4 else ""
        vanish = ""
        if machine is not None and iommu_translates(machine):
            vanish = " and, with a translating IOMMU, may lose them"
        text = (
            f"ACS on {names}{more} sends peer writes up to the root{vanish}; clear ReqRedir and"
            " CmpltRedir there with setpci after every boot, the firmware switch may not be enough."
        )
        yield Finding("warn", "acs-redirect", text, "R44, R87")
    hidden = [bridge for bridge in ours if bridge.redirects is None]
    if hidden and not redirecting:
        text = (
            f"ACS of {len(hidden)} of {len(ours)} PCIe bridges is hidden; run `sudo lspci -vv`"
            " instead of `lspci -vv`."
        )
        yield Finding("unknown", "acs-unknown", text, "R87")


def _acs_matters(evidence: Evidence, machine: Machine) -> bool:
    if evidence.ranks < 2 or evidence.peers is True:
        return False
    kind = classify(machine, evidence.ranks).kind
    return kind not in (Kind.NVLINK, Kind.VM) and machine.virtualisation not in ("vm", "wsl")


def bandwidths(evidence: Evidence) -> Iterator[Finding]:
    """Pairs far slower than others, and close pairs slower than distant ones."""
    table, machine = evidence.measured.pair_gbs, evidence.machine
    size = range(len(table))
    pairs = {(i, j): table[i][j] for i in size for j in size if i != j and table[i][j] > 0}
    if len(pairs) < 2:
        return
    known = machine is not None and len(machine.links) == len(table)
    groups: dict[str, dict[tuple[int, int], float]] = {}
    for (i, j), speed in pairs.items():
        link = level_of(machine.links[i][j]) if known and machine else "all"
        groups.setdefault(link, {})[i, j] = speed
    for link, members in groups.items():
        usual = statistics.median(members.values())
        slow = [pair for pair, speed in members.items() if speed < OUTLIER * usual]
        if slow:
            worst = min(members[pair] for pair in slow)
            kind = "" if link == "all" else f"{link} "
            text = (
                f"{pairs_text(slow)} moves {worst:.1f} GB/s where {kind}pairs usually move"
                f" {usual:.1f}; check slot, riser and chipset lanes of the GPU they share."
            )
            yield Finding("warn", "pair-slow", text, "R94")
    near, far = groups.get("PIX"), groups.get("NODE") or groups.get("PHB")
    if near and far and statistics.median(near.values()) < statistics.median(far.values()):
        text = (
            f"pairs behind one switch move {statistics.median(near.values()):.1f} GB/s and pairs"
            f" across the CPU {statistics.median(far.values()):.1f}, the sign of ACS redirect;"
            " clear it on root and downstream ports."
        )
        yield Finding("warn", "pix-slower", text, "R87")


def latencies(evidence: Evidence) -> Iterator[Finding]:
    """Range of bandwidth and of small-copy time over all pairs."""
    for table, unit, what in (
        (evidence.measured.pair_gbs, "GB/s", "pairs of GPUs copy"),
        (evidence.measured.pair_us, "us", "a 4 KiB copy between two GPUs takes"),
    ):
        cells = [cell for row in table for cell in row if cell > 0]
        if cells:
            text = f"{what} {min(cells):.1f} to {max(cells):.1f} {unit}."
            yield Finding("info", "pair-speed", text, "facts 12")


def kernel(evidence: Evidence) -> Iterator[Finding]:
    """Xid, AER and IOMMU lines since boot."""
    log = evidence.kernel
    if log is None:
        return
    for code, times in log.xids:
        severity, meaning = _XIDS.get(code, ("warn", "see NVIDIA's list of Xid errors"))
        text = f"Xid {code} was logged {times} time{'s' * (times > 1)}: {meaning}."
        yield Finding(severity, "xid", text, "R75, R118")
    down = any(status & SURPRISE_DOWN for status in log.uncorrectable)
    if down or log.link_down:
        text = (
            f"PCIe links went down ({max(log.link_down, len(log.uncorrectable))} lines); boot with"
            " pcie_aspm=off pcie_port_pm=off, lock the generation, use cables below 30 cm and check"
            " the power supply."
        )
        yield Finding("fail", "link-down", text, "R118")
    elif log.uncorrectable:
        status = ", ".join(f"0x{value:08x}" for value in log.uncorrectable)
        text = f"PCIe reported uncorrectable errors ({status}); check risers and cables."
        yield Finding("warn", "aer-uncorrectable", text, "R118")
    if log.corrected:
        severity = "warn" if log.corrected >= MANY_CORRECTED else "info"
        text = f"PCIe corrected {log.corrected} errors since boot; shorter cables stop that."
        yield Finding(severity, "aer-corrected", text, "R118")
    if log.dma_faults:
        text = (
            f"the IOMMU refused {log.dma_faults} accesses of devices; boot with iommu=pt and run"
            " `fastverify doctor --probe`."
        )
        yield Finding("fail", "dma-fault", text, "R44")
    if log.misaligned and not evidence.measured.probe:
        address, step = log.misaligned
        text = (
            f"the kernel refused a peer mapping at {address}, not aligned to {step}; peer access"
            " will fail although it is granted, so serve on NCCL."
        )
        yield Finding("warn", "bar1-alignment", text, "R32")


def binding(evidence: Evidence) -> Iterator[Finding]:
    """Processes kept off the CPUs next to their GPU."""
    machine, allowed = evidence.machine, evidence.cpus
    if machine is None or allowed is None or len(machine.numa_nodes) < 2:
        return
    nodes = {node.index: _cpus(node.cpus) for node in machine.numa_nodes}
    for gpu in machine.gpus[: evidence.ranks]:
        local = nodes.get(gpu.numa_node) if gpu.numa_node is not None else None
        if local and not local & set(allowed):
            text = (
                f"GPU {gpu.index} hangs on NUMA node {gpu.numa_node} and this process may not run"
                " on its CPUs; start it without taskset or with --cpuset-cpus of both nodes."
            )
            yield Finding("warn", "numa-binding", text, "facts 14")
            return


def nvlink_pairs(evidence: Evidence) -> Iterator[Finding]:
    """Two GPUs in use that are not bridged while a bridged pair exists."""
    machine = evidence.installed or evidence.machine
    if machine is None or evidence.environ is None:
        return
    words = evidence.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = [int(word) for word in words if word.strip().isdecimal()]
    place = {gpu.index: position for position, gpu in enumerate(machine.gpus)}
    if len(chosen) < 2 or not machine.links or not set(chosen) <= set(place):
        return
    links = machine.links
    size = range(len(links))
    bridged = [(i, j) for i in size for j in size if i < j and links[i][j].startswith("NV")]
    used = {place[index] for index in chosen}
    if bridged and not any({i, j} <= used for i, j in bridged):
        pair = ",".join(str(machine.gpus[position].index) for position in bridged[0])
        text = (
            f"CUDA_VISIBLE_DEVICES={','.join(words)} leaves out the NVLink bridge, and a group"
            f" larger than a bridged pair crosses PCIe anyway; use CUDA_VISIBLE_DEVICES={pair}."
        )
        yield Finding("warn", "nvlink-pair-unused", text, "R95")


def _cpus(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal() and (not high or high.isdecimal()) and int(high or low) < 1 << 16:
            found |= set(range(int(low), int(high or low) + 1))
    return found


def _list(gpus: list[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus[:8])


def instances(evidence: Evidence) -> Iterator[Finding]:
    """GPUs cut into MIG instances."""
    if evidence.mig:
        text = (
            f"GPU {', '.join(map(str, evidence.mig[:8]))} is in MIG mode, whose instances cannot"
            " map each other's memory; all-reduces between them are staged in host memory."
        )
        yield Finding("warn", "mig", text, "facts 7")


CHECKS = (widths, generations, acs, bandwidths, latencies, kernel, binding, nvlink_pairs, instances)
