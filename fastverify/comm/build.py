"""From a group of proved GPUs to the collective that serves: contenders, measurement, choice."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist

from fastverify.comm import launch as ar
from fastverify.comm.agreement import agree
from fastverify.comm.choice import Table, calls_to_measure, machine_key
from fastverify.comm.collective import Chosen, Collective
from fastverify.comm.flashinfer_backends import PcieIpc, Trtllm
from fastverify.comm.ipc import IpcWorld
from fastverify.comm.layout import HIDDEN_STEP, MAX_ROWS, WORLDS, Layout
from fastverify.comm.peer import MAX_BLOCKS, Peer
from fastverify.comm.probe import Proof
from fastverify.comm.tuning import Progress, tune
from fastverify.comm.unfused import Nccl, sglang_add_norm
from fastverify.comm.workspace import PeerError

logger = logging.getLogger("fastverify")

# Launches worth measuring per world; all are admitted for hidden 7168 (kernels' own bench).
CANDIDATES = {
    2: ("one_shot_1", "one_shot_4", "two_shot_4"),
    4: ("one_shot_1", "one_shot_4", "two_shot_2", "two_shot_4"),
    8: ("one_shot_4", "two_shot_2", "two_shot_4", "two_shot_7", "island_4"),
}


class Wanted(msgspec.Struct, frozen=True):
    """What a server will ask for. verify, draft: rows of its steps; proof: of its peers.

    facts: all that a measurement depends on, for the key of the cache. forced: `--collective`.
    """

    hidden: int
    dtype: str
    verify: tuple[int, ...]
    draft: tuple[int, ...]
    proof: Proof
    facts: dict[str, str]
    forced: str | None = None

    @property
    def max_rows(self) -> int:
        """The largest number of rows that peers will take; more stay with NCCL."""
        rows = [rows for rows in (*self.verify, *self.draft) if 0 < rows <= MAX_ROWS]
        return max(rows, default=0)


class Built(msgspec.Struct, frozen=True):
    """The collective, the table behind it, and why contenders are missing."""

    collective: Collective
    table: Table
    missing: dict[str, str]


def build(
    wanted: Wanted,
    cpu_group: dist.ProcessGroup,
    device_group: dist.ProcessGroup,
    device: torch.device,
    *,
    cache: pathlib.Path | None = None,
    again: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Built | None:
    """Make, measure and choose; collective, before graphs are captured.

    Returns None, on all ranks, when there is nothing to choose: no peer may be used, or no call
    has few enough rows. NCCL itself is never taken over: calls it wins stay with the caller.
    """
    if not wanted.proof.passed or not wanted.max_rows:
        logger.warning("fastverify: %s", wanted.proof.verdict())
        return None
    missing: dict[str, str] = {}
    contenders = [
        Nccl(device_group, sglang_add_norm()),
        *_peers(wanted, cpu_group, device, missing),
    ]
    contenders += _others(wanted, cpu_group, device_group, missing)
    calls = calls_to_measure(
        hidden=wanted.hidden,
        dtype=wanted.dtype,
        verify=wanted.verify,
        draft=wanted.draft,
        max_rows=wanted.max_rows,
    )
    table = tune(
        contenders,
        calls,
        cpu_group,
        key=machine_key(wanted.facts),
        cache=cache,
        forced=wanted.forced,
        again=again,
        progress=progress,
    )
    chosen = Chosen(contenders[1:], table.choice())
    chosen.prepare(calls)
    return Built(chosen, table, missing)


def _peers(
    wanted: Wanted, group: dist.ProcessGroup, device: torch.device, missing: dict[str, str]
) -> list[Collective]:
    world = dist.get_world_size(group)
    if world not in WORLDS or wanted.hidden % HIDDEN_STEP:
        missing["fastverify"] = f"{world} ranks of hidden {wanted.hidden}"
        return []
    layout = Layout(world, wanted.hidden, wanted.max_rows)
    try:
        memory = IpcWorld(layout, group, device)
    except PeerError as error:
        missing["fastverify"] = str(error)
        return []
    launches = []
    for name in CANDIDATES[world]:
        kind, parts = name.rsplit("_", 1)
        launch = ar.Launch(ar.Algorithm[kind.upper()], int(parts))
        if ar.why_not(launch, layout, 1, MAX_BLOCKS) is None:
            launches.append(launch)
    # The last one to be closed gives the shared memory back.
    closers: list[Callable[[], None] | None] = [None] * (len(launches) - 1) + [memory.close]
    return [
        Peer(launch, memory.workspace, close=close)
        for launch, close in zip(launches, closers, strict=True)
    ]


def _others(
    wanted: Wanted,
    cpu_group: dist.ProcessGroup,
    device_group: dist.ProcessGroup,
    missing: dict[str, str],
) -> Sequence[Collective]:
    """FlashInfer's backends where all ranks could make them."""
    shape = {"max_rows": wanted.max_rows, "hidden": wanted.hidden}
    makers: dict[str, Callable[[], Collective]] = {
        "pcie_ipc": lambda: PcieIpc(device_group, add_norm=sglang_add_norm(), **shape),
        "trtllm": lambda: Trtllm(device_group, **shape),
    }
    made = []
    for name, make in makers.items():
        found: list[Collective] = []
        try:
            agree(cpu_group, functools.partial(_make_into, found, make), f"make {name}")
        except PeerError as error:
            missing[name] = str(error)
            for backend in found:
                with contextlib.suppress(Exception):
                    backend.close()
            continue
        made += found
    missing["b12x"] = "not wired: its plans need its own preparation session"
    return made


def _make_into(found: list[Collective], make: Callable[[], Collective]) -> None:
    # Kept here and not returned, because `agree` sends results to the other ranks.
    found.append(make())
