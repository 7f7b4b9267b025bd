from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.comm.nccl_values import (
    enabled_protocols,
    expandable_segments,
    number,
    p2p_disabled,
    p2p_level,
    unknown_protocols,
    user_environment,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SYS", "SYS"),
        ("PHB", "PHB"),
        ("NVL", "NVL"),
        ("4", "SYS"),
        ("99", "SYS"),
        ("3", "PHB"),
        ("2", "PXB"),
        ("1", "PIX"),
        ("0", "LOC"),
        ("2x", "PXB"),
        ("sys", None),
        ("NODE", None),
        (" SYS", None),
        ("-1", None),
        ("", None),
    ],
)
def test_p2p_level_as_nccl_reads_it(text: str, expected: str | None) -> None:
    assert p2p_level(text) == expected


@given(st.text("0123456789abcdefxX+- t", max_size=8) | st.integers(-(2**31), 2**31).map(str))
def test_number_agrees_with_the_c_library(text: str) -> None:
    strtol = ctypes.CDLL(None).strtol
    strtol.restype = ctypes.c_long
    expected = strtol(text.encode(), None, 0)
    assert (number(text) or 0) == expected


@pytest.mark.parametrize(
    ("value", "off"), [("1", True), ("0x1", True), ("true", False), ("2", False), ("", False)]
)
def test_only_one_disables_p2p(value: str, off: bool) -> None:
    assert p2p_disabled({"NCCL_P2P_DISABLE": value}) is off


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("LL", {"*": {"LL"}}),
        ("ll,simple", {"*": {"LL", "Simple"}}),
        ("^LL128", {"*": {"LL", "Simple"}}),
        ("^LL", {"*": {"LL128", "Simple"}}),
        ("^Simple,LL", {"*": {"LL128"}}),
        ("LL,Simple;allreduce:^LL", {"*": {"LL", "Simple"}, "allreduce": {"LL128", "Simple"}}),
        ("AllReduce:LL128", {"allreduce": {"LL128"}}),
        ("LL, Simple", {"*": {"LL"}}),
        ("", {}),
    ],
)
def test_protocol_lists(text: str, enabled: dict[str, set[str]]) -> None:
    assert enabled_protocols(text) == enabled


@pytest.mark.parametrize(
    ("text", "words"),
    [("LL,LL128,Simple", ()), ("LL, Simple", (" Simple",)), ("^LL129;reduce:L", ("LL129", "L"))],
)
def test_words_that_are_no_protocol(text: str, words: tuple[str, ...]) -> None:
    assert unknown_protocols(text) == words


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64,expandable_segments:true", True),
        (" expandable_segments : True ", True),
        ("expandable_segments:False", False),
        ("expandable_segments:True,expandable_segments:False", False),
        ("max_split_size_mb:64", False),
        ("", False),
    ],
)
def test_expandable_segments(text: str, on: bool) -> None:
    assert expandable_segments(text) is on


def test_nccl_files_fill_in_behind_the_environment(tmp_path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_ALGO=Tree\nNCCL_PROTO=Simple\n# NCCL_X=1\nbad\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_P2P_LEVEL=SYS")
    found = user_environment({"NCCL_P2P_LEVEL": "PHB"}, tmp_path, tmp_path)
    assert found == {"NCCL_P2P_LEVEL": "PHB", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def test_a_named_nccl_file_replaces_the_one_at_home(tmp_path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    (tmp_path / "mine").write_text("NCCL_PROTO=LL\n")
    environ = {"NCCL_CONF_FILE": str(tmp_path / "mine")}
    assert user_environment(environ, tmp_path, tmp_path) == {**environ, "NCCL_PROTO": "LL"}
    gone = {"NCCL_CONF_FILE": str(tmp_path / "gone")}
    assert user_environment(gone, tmp_path, tmp_path) == gone
