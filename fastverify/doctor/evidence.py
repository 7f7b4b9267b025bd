"""Everything the checks may reason from, as one frozen value."""

from __future__ import annotations

import msgspec

from fastverify.comm.nccl_case import Profile
from fastverify.doctor.hosttext import Bridge, KernelLog
from fastverify.doctor.measured import Measured
from fastverify.doctor.smi import Sample
from fastverify.logs.metrics import Dump
from fastverify.logs.nccl import NcclLog
from fastverify.logs.server import ServerLog
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding
from fastverify.plan import LaunchPlan


class Evidence(msgspec.Struct, frozen=True):
    """Recorded facts; None or empty means that nobody read them, never that all is well.

    machine: the GPUs in use. installed: the same machine with every GPU, where that is another
    one. complete: the machine was read as a whole, so that a missing fact is worth a finding.
    cpus: CPUs this process may run on. versions: package -> version. notes: findings made while
    reading. accept_length, step_ms, iteration_ms: given by the user.
    """

    machine: Machine | None = None
    installed: Machine | None = None
    complete: bool = False
    environ: dict[str, str] | None = None
    tp: int | None = None
    profile: Profile = "latency"
    graph_text: str | None = None
    bridges: tuple[Bridge, ...] | None = None
    kernel: KernelLog | None = None
    samples: tuple[Sample, ...] = ()
    mig: tuple[int, ...] = ()
    servers: tuple[ServerLog, ...] = ()
    nccl: NcclLog | None = None
    dumps: tuple[Dump, ...] = ()
    measured: Measured = Measured()
    cpus: tuple[int, ...] | None = None
    versions: dict[str, str] | None = None
    plan: LaunchPlan | None = None
    refusal: str | None = None
    drafter_checked: bool = False
    accept_length: float | None = None
    step_ms: float | None = None
    iteration_ms: float | None = None
    notes: tuple[Finding, ...] = ()

    @property
    def ranks(self) -> int:
        """GPUs of the tensor-parallel group: as many as asked for, at most those there are."""
        count = len(self.machine.gpus) if self.machine else 0
        return min(self.tp or count, count)

    @property
    def peers(self) -> bool | None:
        """The probe's verdict over all pairs; None when it did not run or could not answer."""
        cells = {cell for row in self.measured.probe for cell in row} - {"-"}
        if not cells or "unread" in cells:
            return False if cells - {"ok", "unread"} else None
        return cells == {"ok"}

    @property
    def arguments(self) -> dict[str, str]:
        """Server arguments, underscores in their names, from logs or measurement files."""
        merged: dict[str, str] = {}
        for source in (*(log.arguments for log in self.servers), *self.measured.arguments[:1]):
            merged |= {name.lstrip("-").replace("-", "_"): value for name, value in source.items()}
        return merged

    @property
    def draft_length(self) -> int | None:
        """Drafts a step, as the server's arguments state it."""
        for name, less in (
            ("speculative_num_steps", 0),
            ("num_speculative_tokens", 0),
            ("num_spec_tokens", 0),
            ("speculative_num_draft_tokens", 1),
        ):
            value = self.arguments.get(name, "")
            if value.isdecimal() and int(value) > less:
                return int(value) - less
        return self.measured.drafts


def pairs_text(pairs: list[tuple[int, int]], most: int = 4) -> str:
    """`GPU0-1, 2-3 and 4 more` for ordered pairs; both directions of a pair count once."""
    seen = sorted({(min(pair), max(pair)) for pair in pairs})
    shown = ", ".join(f"{i}-{j}" for i, j in seen[:most])
    more = f" and {len(seen) - most} more" if len(seen) > most else ""
    return f"GPU {shown}{more}"
