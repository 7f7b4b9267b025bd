"""Which backend takes which call: a pure function of times that all ranks agreed on."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fastverify.comm.collective import Call
from fastverify.errors import ConfigError

SCHEMA = 1
# A backend must beat NCCL by more than the noise of a measurement to be worth its risk.
MIN_GAIN = 0.03
FALLBACK = "nccl"


class Measured(msgspec.Struct, frozen=True):
    """Time of one call: maximum over ranks, then median over samples. None: it did not run."""

    contender: str
    call: Call
    time_us: float | None
    reason: str = ""


class Row(msgspec.Struct, frozen=True):
    """The choice for one call, with the time that decided it and the time of NCCL beside it."""

    call: Call
    contender: str
    time_us: float | None
    nccl_us: float | None


class Table(msgspec.Struct, frozen=True):
    """Choices for one machine. key: what they depend on; date and command: where they are from."""

    key: str
    rows: tuple[Row, ...]
    date: str
    command: str
    schema: int = SCHEMA

    def choice(self) -> dict[Call, str]:
        """Backend by call, for `Chosen`."""
        return {row.call: row.contender for row in self.rows}


def choose(measured: Iterable[Measured], forced: str | None = None) -> tuple[Row, ...]:
    """The best contender of each call; ties go to the first by name.

    forced: the only contender to use where it runs; NCCL takes the calls it declines.
    Raises ConfigError when no contender has the forced name.
    """
    by_call: dict[Call, list[Measured]] = {}
    names = set()
    for one in measured:
        by_call.setdefault(one.call, []).append(one)
        names.add(one.contender)
    if forced is not None and forced not in names:
        raise ConfigError(
            f"--collective {forced} names no backend that can run here: choose one of"
            f" {', '.join(sorted(names)) or 'none'}."
        )
    return tuple(_choose_one(call, by_call[call], forced) for call in sorted(by_call))


def _choose_one(call: Call, measured: Sequence[Measured], forced: str | None) -> Row:
    times = {one.contender: one.time_us for one in measured if one.time_us is not None}
    nccl_us = times.get(FALLBACK)
    if forced is not None:
        name = forced if forced in times else FALLBACK
        return Row(call, name, times.get(name), nccl_us)
    if not times:
        return Row(call, FALLBACK, None, None)
    best = min(times, key=lambda name: (times[name], name))
    if nccl_us is not None and times[best] > nccl_us * (1 - MIN_GAIN):
        best = FALLBACK
    return Row(call, best, times[best], nccl_us)


def calls_to_measure(
    *, hidden: int, dtype: str, verify: Iterable[int], draft: Iterable[int], max_rows: int
) -> tuple[Call, ...]:
    """The calls of a server.

    verify: rows of verify and plain decode steps, fused and (once a step) plain. draft: rows of
    draft and draft-extend steps, whose models are not fused. Rows past max_rows stay with NCCL.
    """
    fused = {rows for rows in verify if 0 < rows <= max_rows}
    plain = fused | {rows for rows in draft if 0 < rows <= max_rows}
    calls = [Call(rows, hidden, dtype, fused=True) for rows in fused]
    calls += [Call(rows, hidden, dtype, fused=False) for rows in plain]
    return tuple(sorted(calls))


def load_table(path: pathlib.Path, key: str) -> Table | None:
    """The table in a file, or None when there is none for this key or it cannot be read.

    A cache is never an error: the caller measures again.
    """
    try:
        table = msgspec.json.decode(path.read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError):
        return None
    return table if table.key == key and table.schema == SCHEMA else None


def save_table(path: pathlib.Path, table: Table) -> None:
    """Write a table so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{table.key[:8]}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    temporary.replace(path)


def covers(table: Table, calls: Iterable[Call], backends: Iterable[str]) -> bool:
    """True when the table has every call and names only backends that are there."""
    known = {row.call for row in table.rows}
    names = set(backends)
    return set(calls) <= known and all(row.contender in names for row in table.rows)


def describe(rows: Iterable[Row]) -> list[tuple[str, str, str, str]]:
    """Lines for a person: call, backend, its time, and how many times faster than NCCL."""
    lines = []
    for row in rows:
        time = "-" if row.time_us is None else f"{row.time_us:.1f} us"
        known = row.time_us and row.nccl_us
        ratio = f"{row.nccl_us / row.time_us:.2f}x" if known else "-"  # type: ignore[operator]
        lines.append((str(row.call), row.contender, time, ratio))
    return lines


def machine_key(facts: Mapping[str, str]) -> str:
    """A short name for all that a measurement depends on (driver, GPUs, places, versions)."""
    import hashlib

    text = "\n".join(f"{name}={facts[name]}" for name in sorted(facts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
