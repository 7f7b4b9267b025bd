"""Texts of nvidia-smi: `topo -m`, `topo -p2p`, `-q` and `--query-gpu ... --format=csv`.

Headings have changed over the years and are only used where cells cannot be told apart without.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

import msgspec

from fastverify.errors import ConfigError
from fastverify.logs.text import to_number
from fastverify.machine.facts import LINK_CODE, Matrix

_ROW = re.compile(r"^\s*GPU(\d{1,3})\b(.*)$")
_HEAD = re.compile(r"^\s*GPU0\s+(?:GPU1\b|NIC0\b|CPU\b|mlx|$)")
# Wide tables run cells together (`NODENODE`), so codes are matched and not split at blanks.
_LINKS = re.compile(r"NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|X")
_P2P_CELL = re.compile(r"\b[A-Z]{1,8}\b")
_BLOCK = re.compile(r"^GPU\s+[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_ENTRY = re.compile(r"^(\s*)(\S[^:]*?)(?:\s*:\s?(.*))?$")
_MIB = 1 << 20


class Sample(msgspec.Struct, frozen=True):
    """One GPU at one moment."""

    gpu: int
    util_percent: float | None = None
    power_w: float | None = None
    limit_w: float | None = None


class Smi(msgspec.Struct, frozen=True):
    """Facts of `nvidia-smi -q` by GPU in the order printed; None where a label was not found."""

    driver: str | None
    cuda: str | None
    gpus: tuple[Mapping[str, str], ...]


def parse_topo(text: str) -> tuple[Matrix, tuple[int | None, ...]]:
    """Link matrix and NUMA node of each GPU. ConfigError for a cut-off or contradictory table."""
    rows = _rows(text)
    count = len(rows)
    links = []
    for index, rest in enumerate(rows):
        cells = tuple(_LINKS.findall(rest))[:count]
        if len(cells) < count or not all(LINK_CODE.fullmatch(cell) for cell in cells):
            raise ConfigError(
                f"row GPU{index} of the topology table has {len(cells)} cells for {count} GPUs;"
                " record `nvidia-smi topo -m` again in a wide window."
            )
        links.append(cells)
    for i in range(count):
        for j in range(count):
            if (links[i][j] == "X") != (i == j) or links[i][j] != links[j][i]:
                raise ConfigError(
                    f"the topology table says {links[i][j]} from GPU{i} to GPU{j} and"
                    f" {links[j][i]} back; record `nvidia-smi topo -m` again."
                )
    return tuple(links), tuple(_numa(rest) for rest in rows)


def parse_p2p(text: str) -> Matrix:
    """Matrix of `nvidia-smi topo -p2p`, any word counts as a code. ConfigError when cut off."""
    rows = _rows(text)
    matrix = []
    for index, rest in enumerate(rows):
        cells = tuple(_P2P_CELL.findall(rest))[: len(rows)]
        if len(cells) < len(rows) or cells[index] != "X" or cells.count("X") != 1:
            raise ConfigError(
                f"row GPU{index} of the peer table does not fit {len(rows)} GPUs; record"
                " `nvidia-smi topo -p2p r` again in a wide window."
            )
        matrix.append(cells)
    return tuple(matrix)


def _rows(text: str) -> list[str]:
    """What follows `GPUn` in each row of the first table, in order."""
    found: dict[int, str] = {}
    for line in text.split("\n"):
        match = _ROW.match(line)
        if match is None or _HEAD.match(line):
            continue
        index = int(match.group(1))
        if index in found:
            break
        found[index] = match.group(2)
    if not found or sorted(found) != list(range(len(found))):
        raise ConfigError(
            f"the table of nvidia-smi has rows for {len(found)} GPUs that are not numbered from 0"
            " on; record it again."
        )
    return [found[index] for index in range(len(found))]


def _numa(rest: str) -> int | None:
    """The NUMA affinity: the cell behind the CPU list, which may be empty."""
    cells = [cell.strip() for cell in rest.split("\t")]
    if len(cells) < 3:
        cells = rest.split()
    tail = [cell for cell in cells if not _LINKS.fullmatch(cell)]
    lists = [i for i, cell in enumerate(tail) if re.fullmatch(r"\d+(?:[-,]\d+)+", cell)]
    numbers = tail[lists[0] + 1 :] if lists else []
    return int(numbers[0]) if numbers and numbers[0].isdecimal() else None


def parse_smi(text: str) -> Smi:
    """`nvidia-smi -q`, whole or with -d. ConfigError without any GPU block."""
    top: dict[str, str] = {}
    gpus: list[dict[str, str]] = []
    path: list[tuple[int, str]] = []
    for line in text.split("\n"):
        if _BLOCK.match(line):
            gpus.append({})
            path = []
            continue
        match = _ENTRY.match(line)
        if match is None:
            continue
        depth, name, value = len(match.group(1)), match.group(2).strip().lower(), match.group(3)
        while path and path[-1][0] >= depth:
            path.pop()
        if value is None or not value.strip():
            path.append((depth, name))
            continue
        key = "/".join([*(part for _, part in path), name])
        (gpus[-1] if gpus else top).setdefault(key, value.strip()[:200])
    if not gpus:
        raise ConfigError("no GPU is described in this output of nvidia-smi -q; record it again.")
    return Smi(top.get("driver version"), top.get("cuda version"), tuple(gpus))


def first(gpu: Mapping[str, str], *endings: str) -> str | None:
    """The value of the first label that ends with one of `endings` and holds a value."""
    for ending in endings:
        for key, value in gpu.items():
            if f"/{key}".endswith(f"/{ending}") and not value.lower().strip("[]").startswith("n/a"):
                return value
    return None


def mib(text: str | None) -> int | None:
    """Bytes of a cell such as `97887 MiB`; None for anything else."""
    size = to_number(text) if text and "mib" in text.lower() else None
    return int(size * _MIB) if size is not None else None


def samples(smi: Smi) -> tuple[Sample, ...]:
    """Load and power of each GPU; GPUs for which nothing was printed are left out."""
    found = []
    for index, gpu in enumerate(smi.gpus):
        sample = Sample(
            index,
            to_number(first(gpu, "utilization/gpu")),
            to_number(first(gpu, "instantaneous power draw", "power draw", "average power draw")),
            to_number(first(gpu, "current power limit", "power limit", "enforced power limit")),
        )
        if sample != Sample(index):
            found.append(sample)
    return tuple(found)


def in_mig_mode(smi: Smi) -> tuple[int, ...]:
    """Positions of the GPUs that are cut into instances."""
    return tuple(
        index
        for index, gpu in enumerate(smi.gpus)
        if (first(gpu, "mig mode/current") or "").lower() == "enabled"
    )


def parse_csv(text: str) -> tuple[Mapping[str, str], ...]:
    """Rows of `nvidia-smi --query-gpu=... --format=csv` by column name without its unit.

    ConfigError when a row has more or fewer cells than the heading, as with decimal commas.
    """
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.strip().split("\n")) if row]
    heads = [re.sub(r"\s*\[.*\]$", "", cell).lower() for cell in rows[0]] if rows else []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(heads):
            raise ConfigError(
                f"line {number} of the nvidia-smi table has {len(row)} cells and the heading has"
                f" {len(heads)}; record it again with LC_ALL=C."
            )
    if len(rows) < 2 or not heads[0]:
        raise ConfigError("the nvidia-smi table has no row below its heading; record it again.")
    return tuple(dict(zip(heads, row, strict=True)) for row in rows[1:])


def column(row: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The first of these columns that is there."""
    return next((row[name] for name in names if name in row), None)
