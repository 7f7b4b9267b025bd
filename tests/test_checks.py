"""Versions, NCCL packages and ports: what is refused before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify import checks
from fastverify.checks import (
    PINS,
    check_port,
    check_versions,
    closest,
    installed_versions,
)
from tests.sentences import check_refused

GOOD = {
    "sglang": "0.5.23",
    "flashinfer-python": "0.7.2",
    "torch": "2.14.1",
    "triton": "3.8.0",
    "nvidia-nccl-cu13": "2.30.7",
}


@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)])
@pytest.mark.parametrize("torch", ["2.14.1", "2.14.0", "2.14.1+cu130", "2.14.1+cpu", "2.14.0a0+nv"])
def test_what_we_are_made_for_passes(python: tuple[int, int], torch: str) -> None:
    check_versions({**GOOD, "torch": torch}, python)


def test_this_environment_passes() -> None:
    check_versions(installed_versions(), sys.version_info[:2])


def test_the_pins_agree_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]
    pinned = dict(d.split("==") for d in project["dependencies"] if "==" in d)
    assert pinned.keys() == PINS.keys()
    check_versions(pinned, checks.OLDEST_PYTHON)
    oldest, newest = map(checks._dotted, (checks.OLDEST_PYTHON, checks.NEWEST_PYTHON))
    beyond = newest.replace("13", "14")
    assert project["requires-python"] == f">={oldest},<{beyond}"


@pytest.mark.parametrize("python", [(2, 7), (3, 10), (3, 14), (4, 0)])
def test_other_pythons_are_refused(python: tuple[int, int]) -> None:
    found = f"{python[0]}.{python[1]}"
    check_refused(check_versions, GOOD, python, says=(f"Python {found}", "3.11 to 3.13"))


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        ("sglang", "0.5.22", "0.5.23"),
        ("sglang", "0.5.24", "0.5.23"),
        ("sglang", "0.5.23rc1", "0.5.23"),
        ("sglang", "0.5.23.post1", "0.5.23"),
        ("sglang", "main", "0.5.23"),
        ("flashinfer-python", "0.7.1", "0.7.2"),
        ("flashinfer-python", "0.7.4", "0.7.2"),
        ("torch", "2.13.9", "2.14.x"),
        ("torch", "2.15.0+cu130", "2.14.x"),
        ("torch", "3.14.0", "2.14.x"),
        ("triton", "3.7.1", "3.8.x"),
        ("triton", "", "3.8.x"),
    ],
)
def test_other_versions_are_refused(name: str, version: str, wanted: str) -> None:
    says = (f"{name} {version}".strip(), wanted, "pip install", f'"{name}{PINS[name]}"'[1:-1])
    message = check_refused(check_versions, {**GOOD, name: version}, (3, 11), says=says)
    assert message.count("where") == 1


@given(st.sets(st.sampled_from(sorted(PINS)), min_size=1))
def test_every_absent_package_is_named(absent: set[str]) -> None:
    installed = {name: version for name, version in GOOD.items() if name not in absent}
    message = check_refused(check_versions, installed, (3, 12), says=tuple(absent))
    assert message.count("is not installed") == len(absent)
    assert not any(f"{name} is" in message for name in PINS.keys() - absent)


@pytest.mark.parametrize(
    ("torch", "keep", "drop"),
    [
        ("2.14.1", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        ("2.14.1+cu130", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        ("2.14.1+cu126", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    ],
)
def test_two_nccl_packages_are_refused(torch: str, keep: str, drop: str) -> None:
    both = {**GOOD, "torch": torch, "nvidia-nccl-cu12": "2.27.3"}
    says = (
        "nvidia-nccl-cu12 2.27.3",
        "nvidia-nccl-cu13 2.30.7",
        "libnccl.so.2",
        f"pip uninstall {drop}",
        f"{keep}=={both[keep]}",
    )
    check_refused(check_versions, both, (3, 11), says=says)


@pytest.mark.parametrize("name", ["nvidia-nccl-cu12", "nvidia-nccl-cu13", None])
def test_one_nccl_package_or_none_passes(name: str | None) -> None:
    installed = {k: v for k, v in GOOD.items() if not k.startswith("nvidia")}
    check_versions({**installed, **({name: "2.30.7"} if name else {})}, (3, 11))


def test_versions_are_read_without_importing_torch() -> None:
    code = (
        "import sys; from fastverify.checks import installed_versions as f; v = f();"
        "print('torch' in sys.modules, v['sglang'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", installed_versions()["sglang"]]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_refused_with_a_free_one(taken: int, host: str) -> None:
    message = check_refused(check_port, host, taken, says=(taken, host, "already in use"))
    free = int(message.split("--port ")[2].split()[0])
    assert free != taken
    check_port(host, free)


def test_a_port_is_free_again_after_the_check(taken: int) -> None:
    free = checks._free_port("127.0.0.1", taken)
    assert free is not None
    check_port("127.0.0.1", free)
    with socket.create_server(("127.0.0.1", free)):
        check_refused(check_port, "127.0.0.1", free, says=(free,))


def test_no_port_is_offered_when_none_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_bind_error", lambda host, port: checks.errno.EADDRINUSE)
    message = check_refused(check_port, "h", 30000, says=(30000, "already in use"))
    assert "is free" not in message


@pytest.mark.parametrize("port", [-1, 0, 65536, 10**9])
def test_numbers_that_are_no_ports_are_refused(port: int) -> None:
    check_refused(check_port, "127.0.0.1", port, says=(port, 65535))


@pytest.mark.parametrize("code", [checks.errno.EACCES, checks.errno.EPERM])
def test_reserved_ports_are_refused(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_bind_error", lambda host, port: code)
    check_refused(check_port, "127.0.0.1", 80, says=(80, 1024, 65535))


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "a" * 70 + ".x"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    check_refused(check_port, host, 30000, says=(host, "127.0.0.1", "0.0.0.0"))


PRESETS = ("kimi-k2.5", "kimi-k2.6", "deepseek-v3", "glm-5", "tiny")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kimi-k25", "kimi-k2.5"),
        ("Kimi-K2.6", "kimi-k2.6"),
        ("deepseekv3", "deepseek-v3"),
        ("tinny", "tiny"),
        ("llama", None),
        ("", None),
    ],
)
def test_the_closest_name(name: str, expected: str | None) -> None:
    assert closest(name, PRESETS) == expected


@given(st.sampled_from(PRESETS))
def test_a_name_is_closest_to_itself(name: str) -> None:
    assert closest(name.upper(), PRESETS) == name
