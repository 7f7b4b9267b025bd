"""Checks on what surrounds NCCL: its library, graph file, allocator, device list, shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastverify.comm.nccl_case import Case
from fastverify.comm.nccl_graph import check_graph_file
from fastverify.comm.nccl_values import expandable_segments, number
from fastverify.machine.facts import version_tuple
from fastverify.machine.finding import Finding
from fastverify.machine.topology import rank_order

SHM_SEGMENT_BYTES = 9_637_888
"""One shared-memory connection as NCCL's own error message gives it (R113)."""
_USUAL_CHANNELS = 2
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def check(case: Case) -> Iterator[Finding]:
    yield from _library(case)
    yield from _graph_file(case)
    yield from _allocator(case)
    yield from _devices(case)
    yield from _overwritten(case)


def shm_size(case: Case, effective: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the shared-memory mount can hold the segments of a machine that stages in it."""
    channels = max(_USUAL_CHANNELS, number(effective.get("NCCL_MIN_CTAS", "")) or 0)
    need = case.topology.ranks * channels * SHM_SEGMENT_BYTES
    have = case.machine.shm_bytes
    if have is None:
        text = (
            f"the size of the shared-memory mount is unknown and NCCL may need {need >> 20} MiB of "
            "it; check it with `df /dev/shm`."
        )
        yield Finding("unknown", "shm-unknown", text, "R113")
    elif have < need:
        text = (
            f"the shared-memory mount has {have >> 20} MiB and NCCL may need {need >> 20} MiB "
            "without P2P; start the container with --shm-size or --ipc=host."
        )
        yield Finding("warn", "shm-small", text, "R113")


def _library(case: Case) -> Iterator[Finding]:
    machine = case.machine
    if len(machine.nccl_packages) > 1:
        names = " and ".join(machine.nccl_packages)
        text = (
            f"{names} are both installed and own the same file; uninstall one and reinstall the "
            "other."
        )
        yield Finding("fail", "nccl-two-packages", text, "design 3")
    if "VLLM_NCCL_SO_PATH" in case.env:
        text = "VLLM_NCCL_SO_PATH is not read by SGLang; use SGLANG_NCCL_SO_PATH."
        yield Finding("info", "nccl-path-unread", text, "")
    blackwell = any((gpu.compute_capability or (0,))[0] == 12 for gpu in machine.gpus)
    if case.topology.ranks < 2 or not blackwell:
        return
    version = version_tuple(machine.nccl_version)
    if version is None:
        text = (
            "the NCCL version is unknown and these GPUs need 2.26 or later; check it with "
            "NCCL_DEBUG=VERSION."
        )
        yield Finding("unknown", "nccl-version-unknown", text, "R30")
    elif version < (2, 26):
        text = (
            f"NCCL {machine.nccl_version} is older than 2.26, the first for compute capability 12; "
            "install torch's own NCCL again."
        )
        yield Finding("fail", "nccl-too-old", text, "R30")
    elif version[:3] == (2, 26, 2):
        text = "NCCL 2.26.2 crashes on these GPUs from 512 KiB upwards; install a later one."
        yield Finding("fail", "nccl-known-bad", text, "R29")


def _graph_file(case: Case) -> Iterator[Finding]:
    if not case.env.get("NCCL_GRAPH_FILE"):
        return
    if case.launch.graph_text is None:
        text = (
            "NCCL_GRAPH_FILE is set but its content was not checked against the group sizes; "
            "unset it or make it readable."
        )
        yield Finding("unknown", "graph-file-unread", text, "R79")
        return
    devices = [gpu.index for gpu in case.machine.gpus[: case.tp]]
    yield from check_graph_file(case.launch.graph_text, case.groups, devices)


def _allocator(case: Case) -> Iterator[Finding]:
    for name in _ALLOCATORS:
        value = case.env.get(name, "")
        if expandable_segments(value):
            text = (
                f"{name}={value} makes memory that CUDA IPC cannot export, so peer collectives on "
                "it fail; remove expandable_segments."
            )
            yield Finding("warn", "allocator-ipc", text, "R65")


def _devices(case: Case) -> Iterator[Finding]:
    setting = case.env.get("CUDA_VISIBLE_DEVICES", "")
    machine = case.machine
    if "GPU-" in setting or "MIG-" in setting:
        numbers = ",".join(str(index) for index in machine.visible or ())
        remedy = f"write {numbers}" if numbers else "write indices"
        text = (
            "CUDA_VISIBLE_DEVICES holds UUIDs, which SGLang's all-reduce setup reads as numbers "
            f"and fails on; {remedy}."
        )
        yield Finding("fail", "visible-uuid", text, "facts 2")
    models = {gpu.name for gpu in machine.gpus}
    if setting and len(models) > 1 and case.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        text = (
            f"CUDA_VISIBLE_DEVICES={setting} counts GPUs of several models in another order "
            "without CUDA_DEVICE_ORDER=PCI_BUS_ID; check the numbers against nvidia-smi."
        )
        yield Finding("warn", "visible-order", text, "R90")
    if not case.topology.adjacent:
        order = ",".join(str(machine.gpus[rank].index) for rank in rank_order(case.topology))
        text = (
            f"neighbouring ranks lie in different PCIe islands; set CUDA_VISIBLE_DEVICES={order}."
        )
        yield Finding("warn", "ranks-interleaved", text, "facts 2")


def _overwritten(case: Case) -> Iterator[Finding]:
    """The user's values that SGLang 0.5.23 replaces (engine.py, `_set_envs_and_config`)."""
    wanted = case.env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if wanted is not None and number(wanted) != 8:
        text = (
            f"CUDA_DEVICE_MAX_CONNECTIONS={wanted} does not survive, SGLang always writes 8; unset "
            "it."
        )
        yield Finding("info", "overwritten", text, "")
    launch = case.launch
    forced = {
        "NCCL_CUMEM_ENABLE": (launch.symm_mem, "--enable-symm-mem"),
        "NCCL_NVLS_ENABLE": (
            launch.nvls or launch.symm_mem,
            "--enable-symm-mem or --enable-nccl-nvls",
        ),
    }
    for name, (active, flags) in forced.items():
        if active and name in case.env and number(case.env[name]) != 1:
            text = (
                f"{name}={case.env[name]} does not survive {flags}, with which SGLang writes 1; "
                "drop one of them."
            )
            yield Finding("warn", "overwritten", text, "")
