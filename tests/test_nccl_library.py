"""Which NCCL collectives will load, and its version, without importing torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from fastverify.machine.nccl_library import NcclLibrary, decode_version, read_nccl


class _Distribution:
    version = "2.30.7"

    def __init__(self, *files: str) -> None:
        self.files = files

    def locate_file(self, file: str) -> str:
        return f"site/{file}"


LIBRARY_FILE = "nvidia/nccl/lib/libnccl.so.2"
ASKED = {f"site/{LIBRARY_FILE}": 23007, "lib/libnccl.so.2": 22606, "other/libnccl.so": 2708}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("2.30.7", "package")),
        ({"LD_PRELOAD": "libjemalloc.so:lib/libnccl.so.2"}, ("2.26.6", "LD_PRELOAD")),
        ({"LD_PRELOAD": "libjemalloc.so"}, ("2.30.7", "package")),
        ({"SGLANG_NCCL_SO_PATH": "other/libnccl.so"}, ("2.7.8", "SGLANG_NCCL_SO_PATH")),
        ({"SGLANG_NCCL_SO_PATH": "gone.so"}, (None, "SGLANG_NCCL_SO_PATH")),
        ({"VLLM_NCCL_SO_PATH": "other/libnccl.so"}, ("2.30.7", "package")),
    ],
)
def test_the_nccl_that_will_load(environ, expected) -> None:
    def lookup(name: str):
        return _Distribution(LIBRARY_FILE)

    found = read_nccl(environ, lookup, ASKED.get)
    assert (found.version, found.origin) == expected
    assert found.packages == ("nvidia-nccl-cu12==2.30.7", "nvidia-nccl-cu13==2.30.7")


def test_no_nccl_installed() -> None:
    def lookup(name: str):
        raise PackageNotFoundError(name)

    assert read_nccl({}, lookup, ASKED.get) == NcclLibrary(None, None, ())


def test_the_installed_nccl_answers() -> None:
    found = read_nccl({})
    assert found.version is not None and found.version.startswith("2.")
    assert found.origin == "package"


def test_a_file_that_is_no_library() -> None:
    found = read_nccl({"SGLANG_NCCL_SO_PATH": __file__})
    assert (found.version, found.origin) == (None, "SGLANG_NCCL_SO_PATH")


def test_decode_version() -> None:
    assert [decode_version(code) for code in (2708, 22602, 23007)] == ["2.7.8", "2.26.2", "2.30.7"]
