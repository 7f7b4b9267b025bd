"""How NCCL reads its environment values; its parsers fail silently, so ours must agree with them.

Read in NCCL's sources (paths.cc, tuning.cc, param.cc), not in its guide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""Path levels by distance; a string must equal one of them to count."""
PROTOCOLS = ("LL", "LL128", "Simple")
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|\d+)")


def number(text: str) -> int | None:
    """The integer C's strtol(base 0) finds at the start of `text`; None where it finds none.

    NCCL takes 0 in that case, so `true` switches nothing on.
    """
    found = _NUMBER.match(text)
    if not found:
        return None
    digits = found.group(2)
    if digits[:2].lower() != "0x" and digits[0] == "0":
        octal = re.match(r"[0-7]+", digits)
        value = int(octal.group(), 8) if octal else 0
    else:
        value = int(digits, 0)
    return -value if found.group(1) == "-" else value


def p2p_level(text: str) -> str | None:
    """The level that NCCL takes from NCCL_P2P_LEVEL; None when it ignores the value.

    Names are compared exactly, upper case; a value that begins with a digit uses the old scale.
    """
    if text in LEVELS:
        return text
    if not text[:1].isdecimal():
        return None
    return _OLD_LEVELS[min(number(text) or 0, len(_OLD_LEVELS) - 1)]


def p2p_disabled(env: Mapping[str, str]) -> bool:
    """Whether NCCL_P2P_DISABLE switches P2P off, which only the value 1 does."""
    return number(env.get("NCCL_P2P_DISABLE", "")) == 1


def enabled_protocols(text: str) -> dict[str, frozenset[str]]:
    """Protocols that NCCL_PROTO enables by force, for each collective it names (`*`: all others).

    An exclusion list enables all the rest by force as well: `^LL` therefore forces LL128, past
    the test that would keep it off where stores of 128 bytes may be split.
    """
    result: dict[str, frozenset[str]] = {}
    for part in filter(None, text.split(";")):
        collective, colon, names = part.rpartition(":")
        exclude = names.startswith("^")
        wanted = {word.lower() for word in names.removeprefix("^").split(",")}
        result[collective.lower() if colon else "*"] = frozenset(
            name for name in PROTOCOLS if (name.lower() in wanted) != exclude
        )
    return result


def unknown_protocols(text: str) -> tuple[str, ...]:
    """Words in NCCL_PROTO that are no protocol (a blank before a name is enough)."""
    known = {name.lower() for name in PROTOCOLS}
    words = [
        word
        for part in filter(None, text.split(";"))
        for word in part.rpartition(":")[2].removeprefix("^").split(",")
    ]
    return tuple(word for word in words if word.lower() not in known)


def expandable_segments(text: str) -> bool:
    """Whether an allocator setting such as PYTORCH_CUDA_ALLOC_CONF asks for expandable segments."""
    state = False
    for option in text.split(","):
        name, _, value = option.partition(":")
        if name.strip() == "expandable_segments":
            state = value.strip().lower() in ("true", "1")
    return state


def user_environment(
    environ: Mapping[str, str], root: Path = Path("/"), home: Path | None = None
) -> dict[str, str]:
    """What the user has set: the environment, then what NCCL adds from its own files.

    NCCL reads NCCL_CONF_FILE, or else `.nccl.conf` in the home folder, and then `etc/nccl.conf`;
    none of them overrides a variable that is set already. Missing files are normal.
    """
    result = dict(environ)
    named = environ.get("NCCL_CONF_FILE")
    own = Path(named) if named else (home or Path(os.path.expanduser("~"))) / ".nccl.conf"
    for path in (own, root / "etc/nccl.conf"):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, found, value = line.partition("=")
            if found and name and not line.startswith("#"):
                result.setdefault(name, value)
    return result
