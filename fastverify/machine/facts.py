"""What is known about one machine, as one frozen value that every decision starts from."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

SCHEMA = 1
Virtualisation = Literal["none", "vm", "wsl", "container", "unknown"]
Matrix = tuple[tuple[str, ...], ...]

UNKNOWN_LINK = "?"
UNLIMITED = -1
LINK_CODE = re.compile(r"X|NV[1-9]\d?|PIX|PXB|PHB|NODE|SYS|\?")
# nvidia-smi has added codes over the years; any word is accepted, and only OK counts as granted.
P2P_CODE = re.compile(r"X|[A-Z]{1,8}")


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU; None where a value could not be read.

    `index` is the NVML index, which follows PCI order. `pcie_gen` and `pcie_width` are the link as
    it was trained at the moment of reading: an idle card reads low. `iommu_type` is the kernel's
    word for the card's IOMMU group (`identity`, `DMA`, `DMA-FQ`), or `none` without a group.
    `upstream` are the bridges above the card, root port first.
    """

    index: int
    name: str
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    bar1_bytes: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    sm_count: int | None = None
    display_active: bool | None = None
    iommu_type: str | None = None
    upstream: tuple[str, ...] = ()


class NumaNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One NUMA node; `cpus` is the kernel's list notation, `socket` its physical package."""

    index: int
    cpus: str
    socket: int | None = None
    memory_bytes: int | None = None


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a machine; None (or an empty matrix) means that a fact could not be read.

    `gpus` are the GPUs this process may use, in CUDA order: `gpus[k]` is CUDA device k once
    CUDA_DEVICE_ORDER is PCI_BUS_ID. `visible` repeats their NVML indices when
    CUDA_VISIBLE_DEVICES restricted or reordered them, and is None when it was unset; `installed`
    counts every GPU that NVML sees. Rows and columns of the three matrices follow `gpus`:
    `links` holds the codes of `nvidia-smi topo -m` (`?` for a pair that could not be read),
    `p2p_read` and `p2p_write` those of `nvidia-smi topo -p2p`. A grant there is an answer from
    the driver's tables, not a test of delivery.

    `registry_dwords` and `resizable_bar` come from the driver's params file in procfs, the only
    place that shows what is in force. `memlock_bytes` is -1 when unlimited. `nccl_version` is the
    library that collectives will load and `nccl_origin` says through what (`package`,
    `LD_PRELOAD`, `SGLANG_NCCL_SO_PATH`). `unknown` names each unread fact and the command that
    would read it. Host names, users, serials, UUIDs and file paths are never part of it.
    """

    schema: int = SCHEMA
    note: str = ""
    gpus: tuple[Gpu, ...] = ()
    installed: int = 0
    visible: tuple[int, ...] | None = None
    nvml_error: str | None = None
    links: Matrix = ()
    p2p_read: Matrix = ()
    p2p_write: Matrix = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    cpu_vendor: str | None = None
    cpu_model: str | None = None
    cpu_sockets: int | None = None
    cpu_count: int | None = None
    memory_bytes: int | None = None
    driver_version: str | None = None
    driver_flavour: Literal["open", "proprietary"] | None = None
    cuda_driver_version: str | None = None
    registry_dwords: dict[str, str] | None = None
    resizable_bar: bool | None = None
    kernel_cmdline: tuple[str, ...] | None = None
    virtualisation: Virtualisation = "unknown"
    container: bool | None = None
    infiniband_devices: int | None = None
    nccl_version: str | None = None
    nccl_origin: str | None = None
    nccl_packages: tuple[str, ...] = ()
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    unknown: tuple[str, ...] = ()


def version_tuple(text: str | None) -> tuple[int, ...] | None:
    """The leading numbers of a dotted version, or None when there are none."""
    found = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in found.group().split(".")) if found else None


def iommu_translates(machine: Machine) -> bool | None:
    """Whether the IOMMU rewrites the GPUs' addresses, in which case peer writes can vanish.

    The groups' own types decide; the kernel command line is the second witness, because it only
    says what was asked for. None when neither says anything.
    """
    kinds = {gpu.iommu_type for gpu in machine.gpus}
    if any(kind is not None and kind.startswith("DMA") for kind in kinds):
        return True
    if kinds and kinds <= {"none", "identity"}:
        return False
    off = {"iommu=pt", "iommu=off", "iommu.passthrough=1", "amd_iommu=off", "intel_iommu=off"}
    return False if off & set(machine.kernel_cmdline or ()) else None


def forced_p2p(machine: Machine) -> bool | None:
    """Whether the driver keys that stop staging of peer loads and stores are set.

    They matter for cards on CPU root ports (nccl-topology-facts section 8). None when the params
    file could not be read.
    """
    if machine.registry_dwords is None:
        return None
    value = machine.registry_dwords.get("ForceP2P", "0")
    try:
        return int(value, 0) != 0
    except ValueError:
        return None


def socket_of(machine: Machine, gpu: Gpu) -> int | None:
    """The CPU socket a GPU hangs on, or None when the machine does not say."""
    if machine.cpu_sockets == 1:
        return 0
    for node in machine.numa_nodes:
        if node.index == gpu.numa_node:
            return node.socket
    return None


def select(machine: Machine, positions: tuple[int, ...]) -> Machine:
    """The same machine with only the GPUs at these positions of `gpus`, in this order.

    Raises IndexError for a position that does not exist.
    """

    def crop(matrix: Matrix) -> Matrix:
        return tuple(tuple(matrix[i][j] for j in positions) for i in positions) if matrix else ()

    gpus = tuple(machine.gpus[i] for i in positions)
    return msgspec.structs.replace(
        machine,
        gpus=gpus,
        visible=tuple(gpu.index for gpu in gpus),
        links=crop(machine.links),
        p2p_read=crop(machine.p2p_read),
        p2p_write=crop(machine.p2p_write),
    )
