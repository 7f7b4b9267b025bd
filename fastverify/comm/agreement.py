"""Making the ranks of a group agree before any of them goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fastverify.comm.workspace import PeerError


def agree(group: dist.ProcessGroup, work: Callable[[], Any], what: str) -> list[Any]:
    """Results of `work()` of all ranks, in rank order; PeerError on all if it failed on any."""
    try:
        mine = (work(), "")
    except Exception as error:
        mine = (None, str(error) or type(error).__name__)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
    if failed:
        raise PeerError(f"could not {what}: {'; '.join(failed)}")
    return [value for value, _ in everyone]


def require_same(group: dist.ProcessGroup, value: Any, what: str) -> None:
    """PeerError on all ranks, with the values, unless all ranks give an equal value."""
    values = agree(group, lambda: value, f"compare {what}")
    if any(other != values[0] for other in values):
        listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
        raise PeerError(f"the ranks have different {what}: {listed}; start all with one command.")
