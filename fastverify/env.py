"""Every FASTVERIFY_* variable: its meaning, and the only place that reads it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from fastverify.errors import ConfigError

VARIABLES = {
    "FASTVERIFY_DISABLE": "1 leaves SGLang untouched: no hook is registered",
    "FASTVERIFY_RUN_DIR": "folder in which the processes of one server leave status and counters",
    "FASTVERIFY_CACHE": "folder for what is made once: the tiny model, later the tuning tables",
    "FASTVERIFY_ATTENTION": "set by the launcher: which attention serves MLA verify",
    "FASTVERIFY_TEST_BREAK_HOOK": "1 registers a hook on a name that does not exist (tests only)",
}


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """A switch: unset, empty and 0 are off, 1 is on, anything else is refused."""
    value = environ.get(name, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise ConfigError(f"{name} is {value!r}, but only 0 and 1 are understood: set one of them.")


def disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """True when the user asked for an untouched SGLang."""
    return flag("FASTVERIFY_DISABLE", environ)


def run_dir(environ: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """The folder shared by the processes of one server, or None outside our launcher."""
    value = environ.get("FASTVERIFY_RUN_DIR", "")
    return pathlib.Path(value) if value else None


def cache_dir(environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Where things made once are kept."""
    value = environ.get("FASTVERIFY_CACHE", "")
    return pathlib.Path(value) if value else pathlib.Path.home() / ".cache" / "fastverify"
