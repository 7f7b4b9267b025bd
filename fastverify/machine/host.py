"""The host side of the facts: CPU, memory, driver files and PCI bridges, from procfs and sysfs.

Every function takes the root below which `proc`, `sys` and `dev` lie, and returns None for what
it cannot read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fastverify.machine.facts import UNLIMITED, NumaNode, Virtualisation

_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel", "HygonGenuine": "Hygon"}
_CMDLINE = re.compile(r"(?:iommu|amd_iommu|intel_iommu|pci|pcie|vfio)(?:[=._].*)?")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

COMMANDS = {
    "cpu_vendor": "lscpu",
    "cpu_model": "lscpu",
    "cpu_sockets": "lscpu",
    "cpu_count": "nproc --all",
    "numa_nodes": "numactl --hardware",
    "memory_bytes": "free -b",
    "registry_dwords": "grep RegistryDwords /proc/driver/nvidia/params",
    "resizable_bar": "grep EnableResizableBar /proc/driver/nvidia/params",
    "driver_flavour": "cat /proc/driver/nvidia/version",
    "kernel_cmdline": "cat /proc/cmdline",
    "virtualisation": "systemd-detect-virt",
    "container": "systemd-detect-virt --container",
    "infiniband_devices": "ls /sys/class/infiniband",
    "shm_bytes": "df -B1 /dev/shm",
    "memlock_bytes": "ulimit -l",
}


def read_host(root: Path) -> dict[str, Any]:
    """Every host field of `Machine` by name; None for an unreadable one."""
    readers: tuple[Callable[[Path], dict[str, Any]], ...] = (
        _cpu,
        _driver_files,
        _sizes,
        _guest,
    )
    facts: dict[str, Any] = {"numa_nodes": _numa_nodes(root)}
    for reader in readers:
        facts |= reader(root)
    words = read_text(root / "proc/cmdline")
    facts["kernel_cmdline"] = (
        None if words is None else tuple(w for w in words.split() if _CMDLINE.fullmatch(w))
    )
    return facts


def read_text(path: Path) -> str | None:
    """A small file's text without surrounding blanks, or None."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def pci_facts(root: Path, address: str) -> dict[str, Any]:
    """`numa_node`, `iommu_type` and `upstream` of one PCI device."""
    device = root / "sys/bus/pci/devices" / address
    if not device.exists():
        return {}
    numa = read_text(device / "numa_node")
    group = device / "iommu_group"
    path = os.path.realpath(device)
    bridges = [part for part in path.split(os.sep) if _PCI_ADDRESS.fullmatch(part)]
    return {
        # The kernel writes -1 when firmware does not say, which is normal with one NUMA node.
        "numa_node": int(numa) if numa is not None and numa.isdecimal() else None,
        "iommu_type": read_text(group / "type") if group.exists() else "none",
        "upstream": tuple(bridges[:-1]),
    }


def _cpu(root: Path) -> dict[str, Any]:
    rows = [
        (key.strip(), value.strip())
        for line in (read_text(root / "proc/cpuinfo") or "").splitlines()
        for key, _, value in [line.partition(":")]
    ]
    first = dict(reversed(rows))
    vendor = first.get("vendor_id")
    return {
        "cpu_vendor": _VENDORS.get(vendor, vendor) if vendor else None,
        "cpu_model": first.get("model name"),
        "cpu_sockets": len({value for key, value in rows if key == "physical id"}) or None,
        "cpu_count": sum(key == "processor" for key, _ in rows) or None,
    }


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = read_text(folder / "cpulist") or ""
        first = re.match(r"\d+", cpus)
        package = "sys/devices/system/cpu/cpu{}/topology/physical_package_id"
        socket = read_text(root / package.format(first.group())) if first else None
        total = re.search(r"MemTotal:\s*(\d+) kB", read_text(folder / "meminfo") or "")
        nodes.append(
            NumaNode(
                index=int(folder.name.removeprefix("node")),
                cpus=cpus,
                socket=int(socket) if socket is not None and socket.isdecimal() else None,
                memory_bytes=int(total.group(1)) << 10 if total else None,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.index))


def _driver_files(root: Path) -> dict[str, Any]:
    keys, bar = parse_params(read_text(root / "proc/driver/nvidia/params") or "")
    version = read_text(root / "proc/driver/nvidia/version")
    module = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", version or "")
    flavour: Literal["open", "proprietary"] | None = None
    if version and module:
        flavour = "open" if "Open Kernel Module" in version else "proprietary"
    return {
        "registry_dwords": keys,
        "resizable_bar": bar,
        "driver_version": module.group(1) if module else None,
        "driver_flavour": flavour,
    }


def parse_params(text: str) -> tuple[dict[str, str] | None, bool | None]:
    """RegistryDwords and EnableResizableBar of the driver's params file; None where absent."""
    values = {
        key.strip(): value.strip().strip('"')
        for key, found, value in (line.partition(":") for line in text.splitlines())
        if found
    }
    bar = values.get("EnableResizableBar", "")
    enabled = bar != "0" if bar.isdecimal() else None
    if "RegistryDwords" not in values:
        return None, enabled
    pairs = (part.partition("=") for part in values["RegistryDwords"].split(";") if "=" in part)
    return {name.strip(): value.strip() for name, _, value in pairs}, enabled


def _sizes(root: Path) -> dict[str, Any]:
    total = re.search(r"MemTotal:\s*(\d+) kB", read_text(root / "proc/meminfo") or "")
    memory = int(total.group(1)) << 10 if total else None
    limit = read_text(root / "sys/fs/cgroup/memory.max")
    if memory is not None and limit is not None and limit.isdecimal():
        memory = min(memory, int(limit))
    locked = re.search(r"Max locked memory\s+(\S+)", read_text(root / "proc/self/limits") or "")
    memlock = None
    if locked:
        memlock = UNLIMITED if locked.group(1) == "unlimited" else int(locked.group(1))
    try:
        shm = os.statvfs(root / "dev/shm")
        shm_bytes: int | None = shm.f_frsize * shm.f_blocks
    except OSError:
        shm_bytes = None
    ports = root / "sys/class/infiniband"
    return {
        "memory_bytes": memory,
        "memlock_bytes": memlock,
        "shm_bytes": shm_bytes,
        "infiniband_devices": (
            sum(1 for _ in ports.iterdir())
            if ports.is_dir()
            else (0 if ports.parent.is_dir() else None)
        ),
    }


def _guest(root: Path) -> dict[str, Any]:
    release = read_text(root / "proc/sys/kernel/osrelease")
    cpuinfo = read_text(root / "proc/cpuinfo")
    cgroup = read_text(root / "proc/1/cgroup")
    marked = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    named = re.search(r"docker|kubepods|containerd|libpod|lxc", cgroup or "") is not None
    container = True if marked or named else (False if cgroup is not None else None)
    kind: Virtualisation = "unknown"
    if release is not None and "microsoft" in release.lower():
        kind = "wsl"
    elif re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo or "", re.MULTILINE):
        kind = "vm"
    elif container:
        kind = "container"
    elif cpuinfo is not None:
        kind = "none"
    return {"virtualisation": kind, "container": container}
