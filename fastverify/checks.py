"""Checks of the environment before anything is started: versions, NCCL packages, port."""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import os
import socket
from collections.abc import Iterable, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fastverify.errors import ConfigError

# An overlay fits one release of what it hooks into. torch and triton may differ in the last
# number: nothing here depends on their bug fixes.
PINS: Mapping[str, str] = {
    "sglang": "==0.5.23",
    "flashinfer-python": "==0.7.2",
    "torch": "==2.14.*",
    "triton": "==3.8.*",
}
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
LAST_PORT = 65535
PORTS_TO_TRY = 50


def installed_versions() -> dict[str, str]:
    """Versions of the pinned packages and of NCCL, read from metadata; absent ones are left out."""
    found = {}
    for name in (*PINS, *NCCL_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(installed: Mapping[str, str], python: tuple[int, int]) -> None:
    """Refuse what this release was not made for.

    installed: package name -> version, as from installed_versions(); local parts such as +cu130
    do not count. python: major and minor version.
    Raises ConfigError naming every package that is absent or does not fit, and the pins.
    """
    if not OLDEST_PYTHON <= python <= NEWEST_PYTHON:
        raise ConfigError(
            f"Python {python[0]}.{python[1]} is running, but fastverify needs"
            f" {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}: make the environment again"
            f" with python{_dotted(OLDEST_PYTHON)} or a newer one of these."
        )
    wrong = [name for name, pin in PINS.items() if not _fits(installed.get(name), pin)]
    if wrong:
        found = " and ".join(_found(name, installed.get(name), PINS[name]) for name in wrong)
        wanted = " ".join(f'"{name}{PINS[name]}"' for name in wrong)
        raise ConfigError(f"{found}: install what fits with pip install {wanted}.")
    _check_nccl(installed)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _found(name: str, version: str | None, pin: str) -> str:
    wanted = pin.removeprefix("==").replace("*", "x")
    state = "is not installed" if version is None else f"{version or 'of no version'} is installed"
    return f"{name} {state} where {wanted} is needed"


def _fits(version: str | None, pin: str) -> bool:
    """True for a version inside the pin; torch 2.14.0a0, as some vendors build it, is in 2.14.x."""
    if version is None:
        return False
    try:
        return SpecifierSet(pin).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _check_nccl(installed: Mapping[str, str]) -> None:
    both = [name for name in NCCL_PACKAGES if name in installed]
    if len(both) < 2:
        return
    torch = installed.get("torch", "")
    keep, drop = reversed(both) if "+cu12" not in torch else both
    raise ConfigError(
        f"{both[0]} {installed[both[0]]} and {both[1]} {installed[both[1]]} are both installed and"
        " own the same libnccl.so.2, so the one installed last is loaded whichever torch"
        f" {torch} needs: run pip uninstall {drop}, then"
        f" pip install --force-reinstall --no-deps {keep}=={installed[keep]}."
    )


def check_port(host: str, port: int) -> None:
    """Refuse a port the server could not listen on.

    Binds and lets go at once, with the address reuse that the server itself will ask for.
    Raises ConfigError naming the port and, when it is taken, a free one.
    """
    if not 1 <= port <= LAST_PORT:
        raise ConfigError(f"--port is {port}, but ports go from 1 to {LAST_PORT}: choose another.")
    code = _bind_error(host, port)
    if code == 0:
        return
    if code in (errno.EACCES, errno.EPERM):
        raise ConfigError(
            f"--port {port} is reserved for the system's own services on {host}: use one from 1024"
            f" to {LAST_PORT}."
        )
    if code == errno.EADDRINUSE:
        free = _free_port(host, port)
        hint = f"--port {free} is free" if free else "give another with --port"
        raise ConfigError(f"--port {port} is already in use on {host}: {hint}.")
    raise ConfigError(
        f"--host {host} is no address of this machine ({os.strerror(code)}): use 127.0.0.1 for"
        " this machine alone or 0.0.0.0 for all its networks."
    )


def _bind_error(host: str, port: int) -> int:
    """errno of listening at host:port, 0 when it works."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        return errno.EADDRNOTAVAIL
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0


def _free_port(host: str, port: int) -> int | None:
    """The next port after `port` that can be listened on, None when there is none near."""
    candidates = range(max(port + 1, 1024), min(port + PORTS_TO_TRY, LAST_PORT) + 1)
    return next((free for free in candidates if _bind_error(host, free) == 0), None)


def closest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, None when none is alike; upper and lower case are one."""
    by_key = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(name.casefold(), by_key, n=1, cutoff=0.5)
    return by_key[near[0]] if near else None
