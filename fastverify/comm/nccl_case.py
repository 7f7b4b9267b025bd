"""The inputs of the NCCL rules, bundled."""

from __future__ import annotations

from typing import Literal

import msgspec

from fastverify.machine.facts import Machine
from fastverify.machine.topology import Topology

Profile = Literal["latency", "throughput"]


class LaunchFacts(msgspec.Struct, frozen=True):
    """What the launch adds to the machine's facts.

    `groups` are the sizes of all communicators, empty for the TP group alone. `peers` is the
    verdict of the peer probe: True, False, or None when it has not run. `graph_text` is the
    content of the user's NCCL_GRAPH_FILE, None when it was not read. `symm_mem`, `nvls` and `dcp`
    are the SGLang flags on which SGLang's own NCCL settings depend.
    """

    groups: tuple[int, ...] = ()
    nodes: int = 1
    peers: bool | None = None
    graph_text: str | None = None
    symm_mem: bool = False
    nvls: bool = False
    dcp: int = 1


class Case(msgspec.Struct, frozen=True):
    """One question to the rules: which environment fits this machine and launch."""

    machine: Machine
    topology: Topology
    tp: int
    env: dict[str, str]
    profile: Profile
    launch: LaunchFacts

    @property
    def groups(self) -> tuple[int, ...]:
        return self.launch.groups or (self.tp,)


class Setting(msgspec.Struct, frozen=True):
    """One environment variable, its value, and one clause saying why.

    `source`: `fastverify` is to be set before anything starts, `user` stays as it is, `upstream`
    is written by SGLang itself.
    """

    name: str
    value: str
    reason: str
    source: Literal["fastverify", "user", "upstream"]
