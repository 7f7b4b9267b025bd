"""Bounded reading of text files that somebody else wrote."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

import msgspec

from fastverify.errors import ConfigError

HEAD_BYTES = 8 << 20
TAIL_BYTES = 24 << 20
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\ufffd]")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# A log in another 8-bit encoding has a few unreadable letters; a binary file is full of them.
_BINARY_SHARE = 0.1
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)?")


class Text(msgspec.Struct, frozen=True):
    """A file's text without colours and carriage returns. skipped: bytes left out in its middle."""

    name: str
    body: str
    skipped: int = 0


def read_text(path: str | Path) -> Text:
    """Read a text file; of one above 32 MiB only the first 8 and the last 24 MiB.

    Raises ConfigError when it is missing, unreadable, empty or binary.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(HEAD_BYTES + TAIL_BYTES + 1)
            skipped = 0
            if len(data) > HEAD_BYTES + TAIL_BYTES:
                size = file.seek(0, 2)
                skipped = size - HEAD_BYTES - TAIL_BYTES
                file.seek(size - TAIL_BYTES)
                data = data[:HEAD_BYTES] + b"\n" + file.read(TAIL_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{path} cannot be read ({reason}); check the path and its rights."
        ) from None
    return Text(str(path), decode(data, str(path)), max(0, skipped))


def decode(data: bytes, name: str) -> str:
    """Bytes as text: UTF-8, or UTF-16 with its mark, as PowerShell writes it (ConfigError)."""
    if not data.strip():
        raise ConfigError(f"{name} is empty; record it again.")
    encoding = next((encoding for mark, encoding in _BOMS if data.startswith(mark)), "utf-8")
    text = data.decode(encoding, errors="replace").removeprefix("\ufeff")
    sample = text[:65536]
    if "\0" in text or len(_CONTROL.findall(sample)) > _BINARY_SHARE * len(sample):
        raise ConfigError(f"{name} is binary, not text; unpack it or record it as text.")
    return _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def to_number(text: str | None) -> float | None:
    """The first number in a cell such as `92.15 W` or `92,15 W`; None for `[N/A]`."""
    found = _NUMBER.search(text or "")
    return float(found.group().replace(",", ".")) if found else None
