"""The GPU side of the facts, through NVML; it works without nvidia-smi and without a driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastverify.machine.facts import UNKNOWN_LINK, Gpu, Matrix
from fastverify.machine.host import pci_facts

# Values of nvml.h. The Python bindings define NVML_P2P_CAPS_INDEX_READ as a tuple by mistake.
_READ, _WRITE = 0, 1
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_MAX_LINKS = 36
_SWITCH = 2
_CORES_PER_SM = {(7, 0): 64, (7, 5): 64, (8, 0): 64}

COMMANDS = {
    "memory_bytes": "nvidia-smi --query-gpu=memory.total --format=csv",
    "compute_capability": "nvidia-smi --query-gpu=compute_cap --format=csv",
    "pci_address": "nvidia-smi --query-gpu=pci.bus_id --format=csv",
    "bar1_bytes": "nvidia-smi -q -d MEMORY",
    "pcie_gen": "nvidia-smi --query-gpu=pcie.link.gen.current --format=csv",
    "pcie_gen_max": "nvidia-smi --query-gpu=pcie.link.gen.max --format=csv",
    "pcie_width": "nvidia-smi --query-gpu=pcie.link.width.current --format=csv",
    "pcie_width_max": "nvidia-smi --query-gpu=pcie.link.width.max --format=csv",
    "sm_count": "python -c 'import torch; print(torch.cuda.get_device_properties(0))'",
    "display_active": "nvidia-smi --query-gpu=display_active --format=csv",
    "iommu_type": "cat /sys/bus/pci/devices/PCI_ADDRESS/iommu_group/type",
    "links": "nvidia-smi topo -m",
    "p2p_read": "nvidia-smi topo -p2p r",
    "p2p_write": "nvidia-smi topo -p2p w",
}


class GpuFacts(msgspec.Struct, frozen=True):
    """What NVML says, for the visible GPUs only; `error` is set when NVML could not start."""

    gpus: tuple[Gpu, ...] = ()
    installed: int = 0
    visible: tuple[int, ...] | None = None
    error: str | None = None
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    links: Matrix = ()
    p2p_read: Matrix = ()
    p2p_write: Matrix = ()


def read_gpus(nvml: Any, root: Path, environ: Mapping[str, str]) -> GpuFacts:
    """Ask NVML (the `pynvml` module or a stand-in) about every GPU that CUDA would show."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuFacts(error=str(error) or type(error).__name__)
    try:
        return _Reader(nvml, root).read(environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        nvml.nvmlShutdown()


def visible_indices(setting: str, uuids: tuple[str | None, ...]) -> tuple[int, ...]:
    """The NVML indices that CUDA_VISIBLE_DEVICES names, in its order.

    As in CUDA, an entry is an index or a beginning of one UUID, and the list ends at the first
    entry that names nothing. Naming a GPU twice leaves none, because CUDA refuses that list.
    """
    chosen: list[int] = []
    for entry in setting.split(","):
        word = entry.strip()
        if word.isdecimal() and int(word) < len(uuids):
            chosen.append(int(word))
            continue
        matches = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(word)]
        if not word.startswith("GPU-") or len(matches) != 1:
            break
        chosen.append(matches[0])
    return tuple(chosen) if len(set(chosen)) == len(chosen) else ()


class _Reader:
    def __init__(self, nvml: Any, root: Path) -> None:
        self._nvml = nvml
        self._root = root

    def read(self, setting: str | None) -> GpuFacts:
        installed = self._ask("nvmlDeviceGetCount") or 0
        handles = [self._ask("nvmlDeviceGetHandleByIndex", i) for i in range(installed)]
        visible = None
        if setting is not None:
            uuids = tuple(self._text("nvmlDeviceGetUUID", handle) for handle in handles)
            visible = visible_indices(setting, uuids)
        order = range(installed) if visible is None else visible
        gpus = tuple(self._gpu(i, handles[i]) for i in order)
        chosen = [handles[i] for i in order]
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return GpuFacts(
            gpus=gpus,
            installed=installed,
            visible=visible,
            driver_version=self._text("nvmlSystemGetDriverVersion"),
            cuda_driver_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            links=self._links(chosen, [gpu.pci_address for gpu in gpus]),
            p2p_read=self._p2p(chosen, _READ),
            p2p_write=self._p2p(chosen, _WRITE),
        )

    def _ask(self, function: str, *args: Any) -> Any:
        if None in args:
            return None
        try:
            return getattr(self._nvml, function)(*args)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _text(self, function: str, *args: Any) -> str | None:
        value = self._ask(function, *args)
        # Older bindings answer in bytes.
        return value.decode() if isinstance(value, bytes) else value

    def _gpu(self, index: int, handle: Any) -> Gpu:
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        bar1 = self._ask("nvmlDeviceGetBAR1MemoryInfo", handle)
        address = _address(self._ask("nvmlDeviceGetPciInfo", handle))
        cores = self._ask("nvmlDeviceGetNumGpuCores", handle)
        display = self._ask("nvmlDeviceGetDisplayActive", handle)
        per_sm = _CORES_PER_SM.get(tuple(capability), 128) if capability else 0
        return Gpu(
            index=index,
            name=self._text("nvmlDeviceGetName", handle) or "unreadable GPU",
            compute_capability=tuple(capability) if capability else None,
            memory_bytes=memory.total if memory else None,
            pci_address=address,
            bar1_bytes=bar1.bar1Total if bar1 else None,
            pcie_gen=self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_gen_max=self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_width_max=self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            sm_count=cores // per_sm if cores and per_sm else None,
            display_active=None if display is None else bool(display),
            **(pci_facts(self._root, address) if address else {}),
        )

    def _links(self, handles: list[Any], addresses: list[str | None]) -> Matrix:
        nvlinks = [self._nvlinks(handle) for handle in handles]

        def code(i: int, j: int) -> str:
            if i == j:
                return "X"
            direct = nvlinks[i][addresses[j] or "?"]
            # Behind NVSwitch every GPU reaches every other over all of its links.
            count = direct or min(nvlinks[i]["switch"], nvlinks[j]["switch"])
            if count:
                return f"NV{count}"
            level = self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
            return _ANCESTORS.get(level, UNKNOWN_LINK)

        upper = {(i, j): code(i, j) for j in range(len(handles)) for i in range(j + 1)}
        size = range(len(handles))
        return tuple(tuple(upper[min(i, j), max(i, j)] for j in size) for i in size)

    def _nvlinks(self, handle: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for link in range(_MAX_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                break
            if state != 1:
                continue
            if self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH:
                found["switch"] += 1
                continue
            remote = _address(self._ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link))
            if remote is not None:
                found[remote] += 1
        return found

    def _p2p(self, handles: list[Any], direction: int) -> Matrix:
        def code(i: int, j: int) -> str:
            if i == j:
                return "X"
            status = self._ask("nvmlDeviceGetP2PStatus", handles[i], handles[j], direction)
            return _P2P.get(status, "U")

        size = range(len(handles))
        matrix = tuple(tuple(code(i, j) for j in size) for i in size)
        answered = len(handles) < 2 or any(cell not in "XU" for row in matrix for cell in row)
        return matrix if answered else ()


def _address(info: Any) -> str | None:
    """sysfs spelling (`0000:c1:00.0`) of NVML's PCI info, whose domain has eight digits."""
    if info is None:
        return None
    bus_id = info.busId.decode() if isinstance(info.busId, bytes) else info.busId
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
