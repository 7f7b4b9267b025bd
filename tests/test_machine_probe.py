from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastverify.machine import classify, dump_machine, read_machine
from fastverify.machine.facts import UNLIMITED, NumaNode
from fastverify.machine.nccl_library import NcclLibrary
from fastverify.machine.nvml import visible_indices
from fastverify.machine.store import inconsistency, parse_machine

LIBRARY = NcclLibrary("2.30.7", "package", ("nvidia-nccl-cu13==2.30.7",))
SECRETS = ("GPU-5ec7e7", "0123456789", "/home/alice", "buildhost")
PARAMS = """ResmanDebugLevel: 4294967295
EnableResizableBar: 1
RegistryDwords: "ForceP2P=0x11;RMForceP2PType=1; RMPcieP2PType=2"
RegistryDwordsPerDevice: ""
"""
VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build  "
    "(root@buildhost)\n"
)
CPU = (
    "processor\t: {0}\nvendor_id\t: AuthenticAMD\n"
    "model name\t: AMD EPYC 9575F 64-Core Processor\nphysical id\t: {1}\nflags\t\t: fpu sse2\n\n"
)


class NvmlError(Exception):
    pass


class FakeNvml:
    """Four cards: NVLink between 0 and 1, a switch pair 2 and 3; a function may be made to fail."""

    NVMLError = NvmlError

    def __init__(self, count: int = 4, broken: tuple[str, ...] = (), start: str | None = None):
        self.count, self.broken, self.start, self.open = count, set(broken), start, 0

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            return self._fail
        return object.__getattribute__(self, name)

    def _fail(self, *_):
        raise NvmlError("Not Supported")

    def nvmlInit(self):
        if self.start is not None:
            raise NvmlError(self.start)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"handle{index}"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-5ec7e7{self._index(handle)}-0000"

    def nvmlDeviceGetSerial(self, handle):
        return "0123456789"

    def nvmlSystemGetDriverVersion(self):
        return b"595.71.05"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13020

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA RTX PRO 6000 Blackwell Server Edition"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (12, 0)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=97887 << 20)

    def nvmlDeviceGetBAR1MemoryInfo(self, handle):
        return SimpleNamespace(bar1Total=131072 << 20)

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"00000000:{0x40 + self._index(handle):02X}:00.0")

    def nvmlDeviceGetNumGpuCores(self, handle):
        return 24064

    def nvmlDeviceGetDisplayActive(self, handle):
        return 0

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link > 5 or self._index(handle) > 1:
            raise NvmlError("Invalid Argument")
        return int(link < 4)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle, link):
        return self.nvmlDeviceGetPciInfo(f"handle{1 - self._index(handle)}")

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        same = self._index(one) // 2 == self._index(other) // 2
        return 10 if same else 50

    def nvmlDeviceGetP2PStatus(self, one, other, direction):
        assert direction in (0, 1)
        refused = self._index(one) == 3 and direction == 1
        return 1 if refused else 0

    @staticmethod
    def _index(handle):
        return int(handle.removeprefix("handle"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bare-metal host with two sockets, as procfs and sysfs show it."""
    _write(tmp_path / "proc/cpuinfo", "".join(CPU.format(i, i // 2) for i in range(4)))
    _write(tmp_path / "proc/meminfo", "MemTotal:       1048576 kB\nMemFree: 5 kB\n")
    _write(
        tmp_path / "proc/cmdline", "BOOT_IMAGE=/home/alice/vmlinuz iommu=pt quiet pcie_aspm=off\n"
    )
    _write(
        tmp_path / "proc/self/limits", "Max locked memory         unlimited    unlimited    bytes\n"
    )
    _write(tmp_path / "proc/sys/kernel/osrelease", "6.14.0-generic\n")
    _write(tmp_path / "proc/sys/kernel/hostname", "buildhost\n")
    _write(tmp_path / "proc/1/cgroup", "0::/init.scope\n")
    _write(tmp_path / "proc/driver/nvidia/params", PARAMS)
    _write(tmp_path / "proc/driver/nvidia/version", VERSION)
    for node in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        _write(folder / "cpulist", f"{2 * node}-{2 * node + 1}\n")
        _write(folder / "meminfo", f"Node {node} MemTotal:  524288 kB\n")
    for number in range(4):
        package = f"sys/devices/system/cpu/cpu{number}/topology/physical_package_id"
        _write(tmp_path / package, f"{number // 2}\n")
    for index in range(4):
        bus, port = f"0000:{0x40 + index:02x}:00.0", f"0000:3{index}:01.1"
        device = tmp_path / f"sys/devices/pci0000:3{index}/{port}/{bus}"
        _write(device / "numa_node", f"{index // 2}\n")
        _write(device / "iommu_group/type", "identity\n")
        link = tmp_path / "sys/bus/pci/devices" / bus
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def _read(root: Path, nvml: FakeNvml | None = None, **environ: str):
    nvml = nvml or FakeNvml()
    machine = read_machine(root, nvml, environ, LIBRARY)
    assert nvml.open == 0, "NVML was left open"
    assert inconsistency(machine) is None
    assert parse_machine(dump_machine(machine).encode(), "x") == machine
    return machine


def test_a_whole_machine(root: Path) -> None:
    machine = _read(root)
    assert machine.unknown == ()
    assert machine.links[0] == ("X", "NV4", "SYS", "SYS")
    assert machine.links[2] == ("SYS", "SYS", "X", "PIX")
    assert machine.p2p_read[3] == ("OK", "OK", "OK", "X")
    assert machine.p2p_write[3] == ("CNS", "CNS", "CNS", "X")
    gpu = machine.gpus[2]
    assert (gpu.index, gpu.pci_address, gpu.numa_node) == (2, "0000:42:00.0", 1)
    assert (gpu.compute_capability, gpu.memory_bytes, gpu.sm_count) == ((12, 0), 97887 << 20, 188)
    assert (gpu.bar1_bytes, gpu.display_active) == (131072 << 20, False)
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (1, 5, 16, 16)
    assert (gpu.iommu_type, gpu.upstream) == ("identity", ("0000:32:01.1",))
    assert (machine.cpu_vendor, machine.cpu_sockets, machine.cpu_count) == ("AMD", 2, 4)
    assert machine.numa_nodes == (NumaNode(0, "0-1", 0, 1 << 29), NumaNode(1, "2-3", 1, 1 << 29))
    assert (machine.memory_bytes, machine.memlock_bytes) == (1 << 30, UNLIMITED)
    assert machine.registry_dwords == {
        "ForceP2P": "0x11",
        "RMForceP2PType": "1",
        "RMPcieP2PType": "2",
    }
    assert (machine.driver_version, machine.driver_flavour) == ("595.71.05", "open")
    assert (machine.cuda_driver_version, machine.resizable_bar) == ("13.2", True)
    assert machine.kernel_cmdline == ("iommu=pt", "pcie_aspm=off")
    assert (machine.virtualisation, machine.container) == ("none", False)
    assert (machine.infiniband_devices, machine.installed, machine.visible) == (1, 4, None)
    assert (machine.shm_bytes or 0) > 0
    assert classify(machine, 4).sockets == 2


def test_nothing_personal_is_recorded(root: Path) -> None:
    text = dump_machine(_read(root, None, CUDA_VISIBLE_DEVICES="GPU-5ec7e71,0"))
    assert not [word for word in (*SECRETS, str(root)) if word in text]


def test_a_machine_with_nothing_at_all(tmp_path: Path) -> None:
    machine = _read(tmp_path, FakeNvml(start="NVML Shared Library Not Found"))
    assert machine.gpus == ()
    assert machine.nvml_error == "NVML Shared Library Not Found"
    assert (machine.cpu_vendor, machine.shm_bytes, machine.virtualisation) == (
        None,
        None,
        "unknown",
    )
    asked = {line.partition(":")[0] for line in machine.unknown}
    assert {"cpu_model", "numa_nodes", "shm_bytes", "virtualisation", "gpus"} <= asked
    assert "registry_dwords" not in asked, "no driver, so nothing to read"
    assert all(line.partition(": ")[2] for line in machine.unknown)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetBAR1MemoryInfo", "bar1_bytes"),
        ("nvmlDeviceGetMemoryInfo", "memory_bytes"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability"),
        ("nvmlDeviceGetNumGpuCores", "sm_count"),
        ("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_gen"),
        ("nvmlDeviceGetDisplayActive", "display_active"),
        ("nvmlDeviceGetPciInfo", "iommu_type"),
    ],
)
def test_an_unread_gpu_value_is_none_and_said(root: Path, function: str, field: str) -> None:
    machine = _read(root, FakeNvml(broken=(function,)))
    assert {getattr(gpu, field) for gpu in machine.gpus} == {None}
    assert any(line.startswith(f"{field} of GPU 0,1,2,3: ") for line in machine.unknown)


def test_unread_matrices_are_unknown_not_guessed(root: Path) -> None:
    machine = _read(
        root, FakeNvml(broken=("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"))
    )
    assert machine.links[0] == ("X", "NV4", "?", "?")
    assert (machine.p2p_read, machine.p2p_write) == ((), ())
    assert {"links", "p2p_read", "p2p_write"} <= {u.partition(":")[0] for u in machine.unknown}
    assert classify(machine, 4).kind == "unknown"


def test_a_lost_gpu_does_not_stop_the_reading(root: Path) -> None:
    machine = _read(root, FakeNvml(broken=("nvmlDeviceGetHandleByIndex",)))
    assert [gpu.name for gpu in machine.gpus] == ["unreadable GPU"] * 4


def test_nvswitch_joins_all_pairs(root: Path) -> None:
    nvml = FakeNvml(count=2)
    nvml.nvmlDeviceGetNvLinkRemoteDeviceType = lambda handle, link: 2
    assert _read(root, nvml).links == (("X", "NV4"), ("NV4", "X"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("2,0", (2, 0)),
        (" 1 , 3 ", (1, 3)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", (0,)),
        ("0,-1,2", (0,)),
        ("1,1", ()),
        ("GPU-5ec7e73,GPU-5ec7e70", (3, 0)),
        ("GPU-5ec7e7", ()),
        ("GPU-none", ()),
        ("MIG-5ec7e70", ()),
        ("two", ()),
    ],
)
def test_cuda_visible_devices(root: Path, setting: str, expected: tuple[int, ...]) -> None:
    machine = _read(root, None, CUDA_VISIBLE_DEVICES=setting)
    assert machine.visible == expected
    assert tuple(gpu.index for gpu in machine.gpus) == expected
    assert machine.installed == 4
    if expected == (2, 0):
        assert machine.links == (("X", "SYS"), ("SYS", "X"))


def test_visible_indices_without_uuids() -> None:
    assert visible_indices("GPU-1,0", (None, None)) == ()


GUESTS = [
    ("proc/sys/kernel/osrelease", "5.15.0-microsoft-standard-WSL2", "wsl", False),
    ("proc/cpuinfo", "processor : 0\nflags : fpu hypervisor lm\n", "vm", False),
    (".dockerenv", "", "container", True),
    ("run/.containerenv", "", "container", True),
    ("proc/1/cgroup", "0::/kubepods/burstable/pod1", "container", True),
]


@pytest.mark.parametrize(("path", "text", "kind", "container"), GUESTS)
def test_virtualisation(root: Path, path: str, text: str, kind: str, container: bool) -> None:
    _write(root / path, text)
    machine = _read(root)
    assert (machine.virtualisation, machine.container) == (kind, container)


def test_a_container_memory_limit_counts(root: Path) -> None:
    _write(root / "sys/fs/cgroup/memory.max", "268435456\n")
    assert _read(root).memory_bytes == 1 << 28
    _write(root / "sys/fs/cgroup/memory.max", "max\n")
    assert _read(root).memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("text", "keys", "bar"),
    [
        ('EnableResizableBar: 0\nRegistryDwords: ""\n', {}, False),
        ("RegistryDwords: A=1;;B = 0x2;\r\n", {"A": "1", "B": "0x2"}, None),
        ("", None, None),
        ("\x00\xff garbage", None, None),
    ],
)
def test_driver_params(root: Path, text: str, keys, bar) -> None:
    _write(root / "proc/driver/nvidia/params", text)
    machine = _read(root)
    assert (machine.registry_dwords, machine.resizable_bar) == (keys, bar)


def test_the_proprietary_module_is_told_apart(root: Path) -> None:
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n"
    _write(root / "proc/driver/nvidia/version", line)
    broken = FakeNvml(broken=("nvmlSystemGetDriverVersion",))
    machine = _read(root, broken)
    assert (machine.driver_version, machine.driver_flavour) == ("550.54.14", "proprietary")


def test_no_iommu_group_means_no_iommu(root: Path) -> None:
    for group in root.glob("sys/devices/pci*/*/*/iommu_group/type"):
        group.unlink()
        group.parent.rmdir()
    assert {gpu.iommu_type for gpu in _read(root).gpus} == {"none"}


def test_this_machine_is_read_quickly_and_without_torch() -> None:
    code = (
        "import sys, time\n"
        "from fastverify.machine import read_machine\n"
        "start = time.perf_counter(); read_machine(); print(time.perf_counter() - start)\n"
        "sys.exit('torch' in sys.modules)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # The limit is for an idle machine with a driver; here it only catches a command being run.
    assert float(done.stdout) < 5 and time.monotonic() - start < 60
