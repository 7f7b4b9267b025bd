"""Machine files: reading them with a clear sentence for every bad one, and writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from fastverify.errors import ConfigError
from fastverify.machine.facts import LINK_CODE, P2P_CODE, SCHEMA, Machine

MAX_FILE_BYTES = 4 << 20
_HINT = "record one with `fastverify machine > FILE.json`"


def load_machine(path: str | Path) -> Machine:
    """Read a machine recorded by `fastverify machine`.

    Raises ConfigError with one sentence when the file is missing, unreadable, empty, binary,
    truncated, not a machine file, of another schema, or contradicts itself.
    """
    return parse_machine(_read(Path(path)), str(path))


def parse_machine(data: bytes, name: str) -> Machine:
    """The machine in `data`; `name` stands for the file in error messages (ConfigError)."""
    if not data.strip():
        raise ConfigError(f"machine file {name} is empty; {_HINT}.")
    if b"\0" in data:
        raise ConfigError(f"machine file {name} is binary or UTF-16, not UTF-8 JSON; {_HINT}.")
    try:
        raw = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        state = "is truncated" if "truncated" in str(error) else f"is not JSON ({error})"
        raise ConfigError(f"machine file {name} {state}; {_HINT}.") from None
    if not isinstance(raw, dict) or "schema" not in raw or "gpus" not in raw:
        raise ConfigError(f"{name} is JSON but not a machine file (no schema and gpus); {_HINT}.")
    if raw["schema"] != SCHEMA:
        raise ConfigError(
            f"machine file {name} has schema {raw['schema']!r}, this version reads {SCHEMA}; "
            "record it again with the installed fastverify."
        )
    try:
        machine = msgspec.convert(raw, Machine)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"machine file {name} does not fit the schema: {error}; {_HINT}."
        ) from None
    if (problem := inconsistency(machine)) is not None:
        raise ConfigError(f"machine file {name} contradicts itself: {problem}; {_HINT}.")
    return machine


def inconsistency(machine: Machine) -> str | None:
    """What in a machine cannot be true at once, or None."""
    count = len(machine.gpus)
    for field in ("links", "p2p_read", "p2p_write"):
        if (problem := _matrix_problem(field, machine)) is not None:
            return problem
    for what in ("index", "pci_address"):
        known = [value for gpu in machine.gpus if (value := getattr(gpu, what)) is not None]
        if len(set(known)) < len(known):
            return f"two GPUs have the same {what}"
    if machine.installed < count:
        return f"installed is {machine.installed} but {count} GPUs are listed"
    if machine.visible is not None and machine.visible != tuple(g.index for g in machine.gpus):
        return f"visible is {list(machine.visible)} but the GPUs listed are others"
    sizes = [machine.memory_bytes, machine.shm_bytes, machine.cpu_count, machine.cpu_sockets]
    sizes += [size for gpu in machine.gpus for size in (gpu.memory_bytes, gpu.bar1_bytes)]
    if (
        negative := next((size for size in sizes if size is not None and size < 0), None)
    ) is not None:
        return f"a size or count is {negative}"
    return None


def dump_machine(machine: Machine) -> str:
    """The machine as JSON text that `load_machine` reads back to an equal value."""
    return _render(msgspec.to_builtins(machine), 0) + "\n"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"machine file {path} does not exist; {_HINT}.") from None
    except OSError as error:
        raise ConfigError(
            f"machine file {path} cannot be read ({error.strerror}); check the path and its rights."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, too much for a machine; {_HINT}."
        )
    return data


def _matrix_problem(field: str, machine: Machine) -> str | None:
    matrix = getattr(machine, field)
    count = len(machine.gpus)
    if not matrix:
        return None
    if len(matrix) != count:
        return f"{field} has {len(matrix)} rows for {count} GPUs"
    for i, row in enumerate(matrix):
        if len(row) != count:
            return f"row {i} of {field} has {len(row)} cells for {count} GPUs"
    cells = [(i, j, cell) for i, row in enumerate(matrix) for j, cell in enumerate(row)]
    code = LINK_CODE if field == "links" else P2P_CODE
    for i, j, cell in cells:
        if not code.fullmatch(cell) or (cell == "X") != (i == j):
            return f"{field}[{i}][{j}] is {cell!r}"
    for i, j, cell in cells:
        if field == "links" and cell != matrix[j][i]:
            return f"links[{i}][{j}] is {cell} but links[{j}][{i}] is {matrix[j][i]}"
    return None


def _render(value: Any, depth: int) -> str:
    # Matrix rows stay on one line each, so that a person can read and compare recorded files.
    if isinstance(value, dict) and value:
        open_, close = "{", "}"
        items = [f"{json.dumps(key)}: {_render(item, depth + 1)}" for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(x, dict | list | tuple) for x in value):
        open_, close = "[", "]"
        items = [_render(item, depth + 1) for item in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    pad = "  " * (depth + 1)
    return open_ + "\n" + ",\n".join(pad + item for item in items) + "\n" + "  " * depth + close
