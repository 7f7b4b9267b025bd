"""The NCCL environment of a launch: a pure function of the machine and what the user has set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from fastverify.comm.nccl_case import Case, LaunchFacts, Profile, Setting
from fastverify.comm.nccl_lint import lint
from fastverify.comm.nccl_rules import propose
from fastverify.errors import ConfigError
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.machine.topology import Topology

__all__ = ["LaunchFacts", "NcclPlan", "Setting", "nccl_settings"]

_SHOWN = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SGLANG_NCCL_SO_PATH",
    "VLLM_NCCL_SO_PATH",
)
# A setting of the user that answers the same question as one of ours.
_ANSWERS = {
    "NCCL_P2P_LEVEL": ("NCCL_P2P_DISABLE",),
    "NCCL_P2P_DISABLE": ("NCCL_P2P_LEVEL",),
    "NCCL_MIN_CTAS": ("NCCL_MIN_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"),
}


class NcclPlan(msgspec.Struct, frozen=True):
    """Every variable that matters, sorted by name, and what is doubtful about them."""

    settings: tuple[Setting, ...]
    findings: tuple[Finding, ...]

    def environment(self) -> dict[str, str]:
        """What to put into the environment before anything starts; never a user's variable."""
        return {s.name: s.value for s in self.settings if s.source == "fastverify"}


def nccl_settings(
    machine: Machine,
    topology: Topology,
    tp: int,
    user_env: Mapping[str, str],
    profile: Profile = "latency",
    launch: LaunchFacts | None = None,
) -> NcclPlan:
    """Choose NCCL's environment and check what the user has set.

    `user_env` is the whole environment (`nccl_values.user_environment` adds NCCL's own files).
    Variables in it stay as they are and are never in `environment()`. Raises ConfigError for an
    unknown profile or tp below 1.
    """
    if profile not in get_args(Profile):
        raise ConfigError(f"profile is {profile!r}; use latency or throughput.")
    if tp < 1:
        raise ConfigError(f"tensor parallel size is {tp}, it must be at least 1.")
    case = Case(machine, topology, tp, dict(user_env), profile, launch or LaunchFacts())
    proposed: dict[str, Setting] = {}
    findings: list[Finding] = []
    for item in propose(case):
        if isinstance(item, Finding):
            findings.append(item)
        else:
            proposed[item.name] = item
    ours = {name: s for name, s in proposed.items() if not _answered(name, case.env)}
    user = [
        Setting(name, value, _user_reason(name, value, proposed), "user")
        for name, value in case.env.items()
        if name.startswith("NCCL_") or name in _SHOWN
    ]
    upstream = [s for s in _upstream(case) if s.name not in case.env and s.name not in ours]
    settings = sorted([*ours.values(), *user, *upstream], key=lambda setting: setting.name)
    effective = case.env | {s.name: s.value for s in settings if s.source != "user"}
    return NcclPlan(tuple(settings), (*findings, *lint(case, effective)))


def _answered(name: str, env: Mapping[str, str]) -> bool:
    return name in env or any(other in env for other in _ANSWERS.get(name, ()))


def _user_reason(name: str, value: str, proposed: Mapping[str, Setting]) -> str:
    ours = proposed.get(name)
    if ours is None or ours.value == value:
        return "set by the user"
    return f"set by the user; fastverify would take {ours.value} because {ours.reason}"


def _upstream(case: Case) -> list[Setting]:
    """What SGLang 0.5.23 writes itself before it starts the schedulers."""
    if not case.topology.ranks:
        return []
    launch = case.launch
    unset = "SGLang writes this where it is unset"
    cumem = str(int(launch.symm_mem))
    nvls = str(int(launch.nvls or launch.symm_mem))
    settings = [
        Setting("CUDA_DEVICE_MAX_CONNECTIONS", "8", "SGLang always writes 8", "upstream"),
        Setting("NCCL_CUMEM_ENABLE", cumem, unset, "upstream"),
        Setting("NCCL_NVLS_ENABLE", nvls, unset, "upstream"),
    ]
    if launch.dcp > 1:
        reason = f"SGLang writes this with decode context parallel size {launch.dcp}"
        settings.append(Setting("NCCL_GRAPH_MIXING_SUPPORT", "0", reason, "upstream"))
    return settings
