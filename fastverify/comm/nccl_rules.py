"""What fastverify would set for NCCL, each rule from facts to settings and findings.

The values are those of nccl-topology-facts sections 2-8 and 11. A rule that misses a fact sets
nothing and says which fact.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.comm.nccl_case import Case, Setting
from fastverify.comm.nccl_values import p2p_disabled
from fastverify.machine.facts import forced_p2p, iommu_translates, version_tuple
from fastverify.machine.finding import Finding
from fastverify.machine.topology import Kind

THROUGHPUT_CTAS = 16
THROUGHPUT_BUFFER_BYTES = 32 << 20
_PROBE = "run `fastverify doctor --probe`"


def propose(case: Case) -> Iterator[Setting | Finding]:
    """Every setting the facts ask for; the caller drops those that the user has answered."""
    if case.machine.installed > 1:
        reason = "GPU numbers then follow the PCI order of nvidia-smi"
        yield _set("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason)
    if case.topology.ranks > 1:
        yield from _peer_to_peer(case)
        yield from _ring(case)
        yield from _network(case)
        yield from _several_groups(case)
        yield from _driver_keys(case)
        yield from _socket_model(case)


def _set(name: str, value: str, reason: str) -> Setting:
    return Setting(name, value, reason, "fastverify")


def _peer_to_peer(case: Case) -> Iterator[Setting | Finding]:
    topology, peers = case.topology, case.launch.peers
    if peers is False:
        yield _set("NCCL_P2P_DISABLE", "1", "the peer probe failed on this machine")
    elif topology.kind is Kind.NVLINK:
        return
    elif topology.kind is Kind.VM:
        if peers is None:
            reason = f"peer access in a guest ({case.machine.virtualisation}) is unproven"
            yield _set("NCCL_P2P_DISABLE", "1", reason)
    elif topology.worst_link is None:
        text = "the link matrix is unknown, so NCCL keeps its own P2P choice; run "
        yield Finding("unknown", "links-unknown", text + "`nvidia-smi topo -m`.", "facts 7")
    elif _prefers_staging(case):
        yield from _host_staged(case)
    else:
        yield from _p2p_level(case)


def _p2p_level(case: Case) -> Iterator[Setting | Finding]:
    topology, machine = case.topology, case.machine
    translated = iommu_translates(machine)
    proved = case.launch.peers is True
    if translated and not proved:
        text = (
            "the IOMMU translates GPU addresses, so peer writes can vanish; boot with iommu=pt "
            f"and {_PROBE}."
        )
        yield Finding("warn", "iommu-translates", text, "R44")
    if topology.worst_link in ("NV", "PIX", "PXB"):
        return
    if machine.cpu_vendor == "AMD" and topology.ranks == 2:
        # NCCL itself goes up to SYS for two GPUs on an AMD CPU.
        return
    level = "SYS" if topology.worst_link == "SYS" else "PHB"
    path = f"the farthest pair is {topology.worst_link}, beyond NCCL's default PXB"
    if topology.granted is None:
        text = f"NCCL_P2P_LEVEL stays unset: the driver's peer matrix is unknown; {_PROBE}."
        yield Finding("unknown", "p2p-grant-unknown", text, "facts 1")
    elif not topology.granted:
        text = (
            "the driver does not grant peer access to every pair, so NCCL stages those in shared "
            "memory; check `nvidia-smi topo -p2p r` and `w`."
        )
        yield Finding("warn", "p2p-not-granted", text, "facts 1")
    elif proved:
        yield _set("NCCL_P2P_LEVEL", level, f"{path}, and the peer probe passed")
    elif translated is False:
        yield _set("NCCL_P2P_LEVEL", level, f"{path}; the driver grants peers, no IOMMU translates")
        text = (
            f"NCCL_P2P_LEVEL={level} rests on the driver's grant, which is not a test of delivery; "
            f"{_PROBE}."
        )
        yield Finding("info", "p2p-not-probed", text, "R41")
    elif translated is None:
        text = f"NCCL_P2P_LEVEL stays unset: whether the IOMMU translates is unknown; {_PROBE}."
        yield Finding("unknown", "iommu-unknown", text, "facts 10")


def _prefers_staging(case: Case) -> bool:
    """Many users on two sockets whose cards stage peer traffic anyway (R91)."""
    if case.profile != "throughput" or (case.topology.sockets or 0) < 2:
        return False
    keeps_p2p = "NCCL_P2P_DISABLE" in case.env and not p2p_disabled(case.env)
    if "NCCL_P2P_LEVEL" in case.env or keeps_p2p:
        return False
    return forced_p2p(case.machine) is False


def _host_staged(case: Case) -> Iterator[Setting | Finding]:
    why = "many users on two sockets without forced P2P: host staging has more aggregate paths"
    yield _set("NCCL_P2P_DISABLE", "1", why)
    yield _set("NCCL_MIN_CTAS", str(THROUGHPUT_CTAS), "host staging needs channels to scale")
    reason = "larger staging buffers keep those channels busy"
    yield _set("NCCL_BUFFSIZE", str(THROUGHPUT_BUFFER_BYTES), reason)
    mib = THROUGHPUT_CTAS * 2 * THROUGHPUT_BUFFER_BYTES >> 20
    text = (
        f"{THROUGHPUT_CTAS} channels of 32 MiB to two ring neighbours take about {mib} MiB per "
        "GPU; leave that much outside the KV pool."
    )
    yield Finding("info", "nccl-buffers", text, "R80")


def _ring(case: Case) -> Iterator[Setting | Finding]:
    if case.topology.switches > 1:
        reason = (
            f"a ring keeps the {case.topology.switches} PCIe switches from the write collapse of "
            "several GPUs sending up one switch to different roots"
        )
        yield _set("NCCL_ALGO", "Ring", reason)


def _network(case: Case) -> Iterator[Setting | Finding]:
    found = case.machine.infiniband_devices
    if case.launch.nodes == 1 and found:
        yield _set("NCCL_IB_DISABLE", "1", f"one host needs none of its {found} InfiniBand devices")


def _several_groups(case: Case) -> Iterator[Setting | Finding]:
    sizes = sorted({size for size in case.groups if size > 1}, reverse=True)
    nccl = version_tuple(case.machine.nccl_version)
    cuda = version_tuple(case.machine.cuda_driver_version)
    if len(sizes) > 1 and nccl and cuda and nccl >= (2, 26) and cuda >= (12, 3):
        names = " and ".join(str(size) for size in sizes)
        reason = f"groups of {names} ranks share each GPU and must keep one launch order"
        yield _set("NCCL_LAUNCH_ORDER_IMPLICIT", "1", reason)


def _driver_keys(case: Case) -> Iterator[Setting | Finding]:
    sockets = case.topology.sockets or 0
    if case.profile == "throughput" and sockets > 1 and forced_p2p(case.machine) is None:
        text = (
            "the driver's RegistryDwords are unknown, so NCCL is not tuned for many users; "
            "check `grep RegistryDwords /proc/driver/nvidia/params`."
        )
        yield Finding("unknown", "driver-keys-unknown", text, "R91")


def _socket_model(case: Case) -> Iterator[Setting | Finding]:
    amd = case.machine.cpu_vendor == "AMD"
    far = (case.topology.sockets or 0) > 1 and case.topology.worst_link == "SYS"
    if amd and far and case.topology.ranks > 4 and "NCCL_GRAPH_FILE" not in case.env:
        text = (
            "NCCL takes 16 GB/s for every AMD socket link and may find a poor ring; look for "
            "`bw 0.1` or `nChannels 2` with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH and give it "
            "an NCCL_GRAPH_FILE if you see them."
        )
        yield Finding("info", "amd-socket-model", text, "R78")
