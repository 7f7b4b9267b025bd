from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.comm.nccl_graph import MAX_FILE_BYTES, check_graph_file, read_graph_file
from tests.sentences import check_refused


def graph(
    count: int = 8, channels: int = 2, version: str = "1", first: int = 0, **attrs: str
) -> str:
    gpus = "".join(f'<gpu dev="{first + i:x}"/>' for i in range(count))
    values = {
        "id": "0",
        "pattern": "4",
        "nchannels": str(channels),
        "typeintra": "PHB",
        "typeinter": "PIX",
        **attrs,
    }
    head = " ".join(f'{key}="{value}"' for key, value in values.items())
    return (
        f'<graphs version="{version}"><graph {head}>'
        + f"<channel>{gpus}</channel>" * channels
        + "</graph></graphs>"
    )


def codes(text: str, *sizes: int, devices: tuple[int, ...] | None = None) -> list[str]:
    return [found.code for found in check_graph_file(text, sizes, devices)]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_graph_of_the_group_fits(size: int) -> None:
    assert codes(graph(size), size, devices=tuple(range(size))) == []
    # Groups of one rank build no ring.
    assert codes(graph(size), size, 1) == []


@given(st.integers(2, 16), st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_every_other_group_size_is_refused(listed: int, sizes: list[int]) -> None:
    wrong = {size for size in sizes if size not in (1, listed)}
    found = check_graph_file(graph(listed), sizes)
    assert len(found) == len(wrong)
    assert all(f.severity == "fail" and f.code == "graph-file-size" for f in found)
    assert all(any(f"group of {size} ranks" in f.text for f in found) for size in wrong)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "graph-file-xml"),
        ("GPU0\tGPU1", "graph-file-xml"),
        (graph()[:-20], "graph-file-xml"),
        ("<system version='1'/>", "graph-file-xml"),
        ('<!DOCTYPE x [<!ENTITY a "b">]>' + graph(), "graph-file-xml"),
        (graph(version="2"), "graph-file-version"),
        (graph().replace(' version="1"', ""), "graph-file-version"),
        ('<graphs version="1"/>', "graph-file-empty"),
        (graph(channels=0), "graph-file-empty"),
        (graph(typeintra="NODE"), "graph-file-link"),
        (graph(typeinter="sys"), "graph-file-link"),
        (graph(nchannels="4"), "graph-file-channels"),
        (graph().replace('dev="1"', 'dev="0"'), "graph-file-channel"),
        (graph().replace('dev="1"', 'dev="one"'), "graph-file-channel"),
        (graph().replace(' dev="1"', ""), "graph-file-channel"),
    ],
)
def test_files_that_nccl_would_choke_on(text: str, code: str) -> None:
    assert set(codes(text, 8)) == {code}


def test_devices_are_compared_with_the_gpus_in_use() -> None:
    assert codes(graph(4), 4, devices=(4, 5, 6, 7)) == ["graph-file-device"]
    assert codes(graph(4, first=4), 4, devices=(4, 5, 6, 7)) == []
    # dev is hexadecimal: a is GPU 10.
    assert codes(graph(2, first=9), 2, devices=(9, 10)) == []


def test_an_explicit_rank_stands_for_the_device() -> None:
    ranks = graph(2).replace('<gpu dev="0"/>', '<gpu dev="c" rank="0"/>')
    ranks = ranks.replace('<gpu dev="1"/>', '<gpu dev="d" rank="1"/>')
    assert codes(ranks, 2, devices=(0, 1)) == []


def test_comments_are_allowed() -> None:
    assert codes("<!-- mine -->" + graph(4), 4) == []


def test_reading(tmp_path) -> None:
    path = tmp_path / "graph.xml"
    path.write_text(graph())
    assert read_graph_file(path) == graph()
    check_refused(read_graph_file, tmp_path / "gone.xml", says=("gone.xml", "NCCL_GRAPH_FILE"))
    check_refused(read_graph_file, tmp_path, says=("cannot be read",))
    path.write_bytes(b"\0" * 10)
    check_refused(read_graph_file, path, says=("graph.xml", "1 MiB"))
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    check_refused(read_graph_file, path, says=("graph.xml", "1 MiB"))
