"""What the processes of one server tell each other through its run folder.

The launcher makes the folder; scheduler processes write small JSON files into it; each file is
replaced whole, so a reader never sees half of one.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import TypeVar

import msgspec

from fastverify.graphs import Runner

T = TypeVar("T")


class Failure(msgspec.Struct, frozen=True):
    """Why a scheduler process refused to start. `failure-PID.json`."""

    message: str


class Active(msgspec.Struct, frozen=True):
    """What runs, by rank 0's account once it can serve. `active.json`.

    drafts: drafts a step, None without speculation. captured: phase -> the runner's graphs.
    kernel: phases our MLA kernel serves, None when it was not asked for.
    """

    device: str
    tp: int
    drafts: int | None
    attention: dict[str, str]
    captured: dict[str, Runner]
    hooks: tuple[str, ...]
    all_reduce: str
    kernel: str | None = None


class VerifyCounts(msgspec.Struct):
    """Counters of rank 0 since start. `verify.json`.

    steps: "batch x draft tokens, graph|eager" -> verify steps.
    accepted: accepted drafts of one request in one step -> times seen.
    """

    graph_steps: int = 0
    eager_steps: int = 0
    steps: dict[str, int] = {}
    accepted: dict[int, int] = {}
    eager_reasons: dict[str, int] = {}


def write(folder: pathlib.Path, name: str, value: msgspec.Struct) -> None:
    """Replace folder/name by value as JSON."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(value))
    os.replace(temporary, folder / name)


def read(folder: pathlib.Path, name: str, kind: type[T]) -> T | None:
    """Read folder/name, or None when no process has written it."""
    try:
        return msgspec.json.decode((folder / name).read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def failures(folder: pathlib.Path) -> tuple[str, ...]:
    """Messages of all processes that refused to start, without repetitions."""
    found = {
        msgspec.json.decode(path.read_bytes(), type=Failure).message
        for path in folder.glob("failure-*.json")
    }
    return tuple(sorted(found))
