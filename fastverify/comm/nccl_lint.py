"""What is doubtful in the environment a launch would run with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastverify.comm import nccl_channels, nccl_host
from fastverify.comm.nccl_case import Case
from fastverify.comm.nccl_values import (
    enabled_protocols,
    number,
    p2p_disabled,
    p2p_level,
    unknown_protocols,
)
from fastverify.machine.finding import Finding
from fastverify.machine.topology import Kind

_ON_OFF = (
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "NCCL_GRAPH_MIXING_SUPPORT",
)
_NETWORK_ONLY = (
    "NCCL_ALLOC_P2P_NET_LL_BUFFERS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_CROSS_NIC",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
)


def lint(case: Case, effective: Mapping[str, str]) -> tuple[Finding, ...]:
    """Findings about the user's variables and about what the processes will really see.

    `effective` is the environment with everything that fastverify and SGLang add.
    """
    checks = (
        _numbers(case.env),
        _p2p(case),
        _shared_memory(case, effective),
        _protocols(case),
        nccl_channels.check(case),
        _without_effect(case),
        nccl_host.check(case),
    )
    return tuple(finding for check in checks for finding in check)


def _numbers(env: Mapping[str, str]) -> Iterator[Finding]:
    for name in _ON_OFF:
        value = env.get(name, "")
        if value and number(value) is None:
            text = f"{name}={value} is read as 0, because NCCL wants a number; write 1 or 0."
            yield Finding("warn", "not-a-number", text, "facts 2")


def _p2p(case: Case) -> Iterator[Finding]:
    value = case.env.get("NCCL_P2P_LEVEL", "")
    level = p2p_level(value)
    if value and level is None:
        known = "LOC, NVL, PIX, PXB, PHB or SYS in capitals"
        text = f"NCCL_P2P_LEVEL={value} is ignored without a word; use {known}."
        yield Finding("warn", "p2p-level-ignored", text, "R93")
    elif level is not None and value != level:
        text = f"NCCL_P2P_LEVEL={value} means {level} to NCCL; write the name."
        yield Finding("info", "p2p-level-number", text, "R93")
    disabled = p2p_disabled(case.env)
    if disabled and value:
        text = f"NCCL_P2P_DISABLE=1 beats NCCL_P2P_LEVEL={value}; unset one of them."
        yield Finding("warn", "p2p-contradiction", text, "facts 2")
    if disabled and case.topology.kind is Kind.NVLINK:
        text = "NCCL_P2P_DISABLE=1 leaves the NVLinks of this machine unused; unset it."
        yield Finding("warn", "nvlink-unused", text, "facts 2")
    if case.launch.peers is False and not disabled and ("NCCL_P2P_LEVEL" in case.env):
        text = f"NCCL_P2P_LEVEL={value} keeps P2P on although the peer probe failed; unset it."
        yield Finding("fail", "p2p-probe-failed", text, "R41")


def _shared_memory(case: Case, effective: Mapping[str, str]) -> Iterator[Finding]:
    if case.topology.ranks < 2:
        return
    staged = _staged(case, effective)
    if number(effective.get("NCCL_SHM_DISABLE", "")) == 1:
        if staged:
            text = "NCCL_SHM_DISABLE=1 removes the only path of the pairs without P2P; unset it."
            yield Finding("fail", "shm-contradiction", text, "facts 2")
        else:
            text = "NCCL_SHM_DISABLE=1 removes the fallback for pairs without P2P; unset it."
            yield Finding("warn", "shm-disabled", text, "facts 2")
    elif staged:
        yield from nccl_host.shm_size(case, effective)


def _staged(case: Case, effective: Mapping[str, str]) -> bool:
    """Whether some pair is known to go through shared memory."""
    topology = case.topology
    if p2p_disabled(effective) or topology.granted is False:
        return True
    if topology.kind is Kind.NVLINK or topology.worst_link is None:
        return False
    amd_pair = case.machine.cpu_vendor == "AMD" and topology.ranks == 2
    level = p2p_level(effective.get("NCCL_P2P_LEVEL", "")) or ("SYS" if amd_pair else "PXB")
    reach = {"LOC": 0, "NVL": 1, "NVB": 1, "C2C": 1, "PIX": 2, "PHB": 4, "SYS": 5}.get(level, 3)
    needs = {"NV": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 4, "SYS": 5}
    return needs[topology.worst_link] > reach


def _protocols(case: Case) -> Iterator[Finding]:
    value = case.env.get("NCCL_PROTO", "")
    if not value:
        return
    if wrong := unknown_protocols(value):
        text = (
            f"NCCL_PROTO={value} holds {wrong[0]!r}, which is none of LL, LL128, Simple; write it "
            "without blanks."
        )
        yield Finding("warn", "proto-unknown", text, "facts 2")
    enabled = enabled_protocols(value)
    forced = [name for name, protocols in enabled.items() if "LL128" in protocols]
    if forced and case.topology.ranks > 1 and case.topology.kind is not Kind.NVLINK:
        text = (
            f"NCCL_PROTO={value} forces LL128 past NCCL's safety test, which can corrupt data over "
            "PCIe; use ^LL128, or soak-test it with checked values first."
        )
        yield Finding("warn", "proto-ll128-forced", text, "R81")
    default = None if wrong else enabled.get("allreduce", enabled.get("*"))
    if default == frozenset({"LL"}):
        severe = case.profile == "throughput"
        text = (
            f"NCCL_PROTO={value} runs prefill and large batches on LL too, at half the wire speed; "
            "use ^LL128."
        )
        yield Finding("warn" if severe else "info", "proto-ll-only", text, "R81")
    elif default == frozenset():
        text = f"NCCL_PROTO={value} leaves no protocol for all-reduce; use ^LL128 or unset it."
        yield Finding("fail", "proto-none", text, "facts 5")


def _without_effect(case: Case) -> Iterator[Finding]:
    if case.launch.nodes == 1:
        for name in _NETWORK_ONLY:
            if name in case.env:
                text = f"{name}={case.env[name]} has no effect on one host; unset it."
                yield Finding("info", "network-only", text, "facts 15")
    plugin = case.env.get("NCCL_TUNER_PLUGIN", "none")
    if plugin not in ("", "none"):
        text = (
            f"NCCL_TUNER_PLUGIN={plugin} helps messages of 512 KiB and more, not decode or verify; "
            "keep it only if your own runs gain."
        )
        yield Finding("info", "tuner-plugin", text, "R82")
    if number(case.env.get("NCCL_GRAPH_MIXING_SUPPORT", "1")) == 0:
        text = (
            "NCCL_GRAPH_MIXING_SUPPORT=0 is unsafe with captured verify beside eager prefill on "
            "one communicator; unset it."
        )
        yield Finding("warn", "graph-mixing-off", text, "facts 2")
