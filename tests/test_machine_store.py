from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings

from fastverify.errors import ConfigError
from fastverify.machine import dump_machine, load_machine
from fastverify.machine.facts import (
    Gpu,
    Machine,
    forced_p2p,
    iommu_translates,
    select,
    socket_of,
    version_tuple,
)
from fastverify.machine.store import MAX_FILE_BYTES, inconsistency, parse_machine
from tests.machines import FOLDER, NAMES, machine, machines
from tests.sentences import check_refused

EXPECTED = {
    "one-switch",
    "two-switches",
    "two-sockets",
    "four-islands",
    "laptop",
    "none",
    "h200",
    "two-h200",
    "vm",
}


def test_every_kind_of_machine_is_recorded() -> None:
    assert set(NAMES) == EXPECTED


@pytest.mark.parametrize("name", NAMES)
def test_recorded_files_are_what_the_writer_writes(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text()
    assert dump_machine(machine(name)) == text
    assert machine(name).note.startswith("invented example")


@settings(max_examples=50)
@given(machines())
def test_dump_and_load_are_inverse(value: Machine) -> None:
    assert inconsistency(value) is None
    assert parse_machine(dump_machine(value).encode(), "x") == value


def _edited(name: str = "one-switch", **changes: object) -> bytes:
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    for key, value in changes.items():
        if value is None:
            del raw[key]
        else:
            raw[key] = value
    return json.dumps(raw).encode()


WHOLE = (FOLDER / "one-switch.json").read_bytes()
ROW = ["X", "PIX", "PXB", "PXB"]
BAD = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "binary": (b"\x7fELF\0\0", "is binary"),
    "utf-16": (WHOLE.decode().encode("utf-16"), "is binary or UTF-16"),
    "latin-1": (WHOLE.replace(b"invented", b"\xe9"), "is not JSON"),
    "half": (WHOLE[: len(WHOLE) // 2], "is truncated"),
    "text": (b"GPU0\tGPU1\n", "is not JSON"),
    "nested": (b"[" * 100_000, "is"),
    "list": (b"[]", "not a machine file"),
    "foreign": (b'{"architectures": ["DeepseekV3"]}', "not a machine file"),
    "newer": (_edited(schema=2), "has schema 2, this version reads 1"),
    "older": (_edited(schema="1"), "has schema '1'"),
    "extra": (_edited(host="x"), "unknown field `host`"),
    "type": (_edited(shm_bytes="64M"), "`$.shm_bytes`"),
    "gpu type": (_edited(gpus=[{"index": 0}]), "missing required field `name`"),
    "rows": (_edited(links=[ROW]), "links has 1 rows for 4 GPUs"),
    "ragged": (_edited(links=[ROW, ROW[:3], ROW, ROW]), "row 1 of links has 3 cells"),
    "short last row": (_edited(links=[ROW, ROW, ROW, ROW[:3]]), "row 3 of links has 3 cells"),
    "diagonal": (_edited(links=[ROW] * 4), "links[1][0] is 'X'"),
    "asymmetric": (
        _edited(links=[ROW, ["PXB", "X", "PXB", "PXB"], ["PXB"] * 2 + ["X", "PIX"], ROW[::-1]]),
        "links[0][1] is PIX but links[1][0] is PXB",
    ),
    "code": (_edited(p2p_read=[["X"] + ["ok"] * 3] * 4), "p2p_read[0][1] is 'ok'"),
    "count": (_edited(installed=3), "installed is 3 but 4 GPUs"),
    "visible": (_edited(visible=[3, 2, 1, 0]), "visible is [3, 2, 1, 0]"),
    "negative": (_edited(shm_bytes=-5), "a size or count is -5"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_sentence(case: str, tmp_path) -> None:
    data, message = BAD[case]
    path = tmp_path / "machine.json"
    path.write_bytes(data)
    assert message in check_refused(load_machine, path, says=("machine.json",))


def test_a_file_cut_anywhere_is_refused_or_whole() -> None:
    for end in range(0, len(WHOLE) - 2, 97):
        with pytest.raises(ConfigError):
            parse_machine(WHOLE[:end], "x")


def test_unreadable_paths_are_refused(tmp_path) -> None:
    check_refused(load_machine, tmp_path / "absent.json", says=("absent.json does not exist",))
    check_refused(load_machine, tmp_path, says=("cannot be read",))
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    check_refused(load_machine, large, says=("larger than 4 MiB",))


def test_a_byte_order_mark_and_other_layout_are_accepted() -> None:
    packed = json.dumps(json.loads(WHOLE), separators=(",", ":"))
    assert parse_machine(b"\xef\xbb\xbf" + packed.encode(), "x") == machine("one-switch")


def test_two_gpus_at_one_address_contradict() -> None:
    gpu = Gpu(index=0, name="a", pci_address="0000:01:00.0")
    twice = Machine(gpus=(gpu, msgspec.structs.replace(gpu, index=1)), installed=2)
    assert inconsistency(twice) == "two GPUs have the same pci_address"


def test_select_reorders_rows_and_columns() -> None:
    part = select(machine("two-sockets"), (4, 0, 1))
    assert part.visible == (4, 0, 1)
    assert part.links == (("X", "SYS", "SYS"), ("SYS", "X", "NODE"), ("SYS", "NODE", "X"))
    assert inconsistency(part) is None


@pytest.mark.parametrize(
    ("kinds", "cmdline", "expected"),
    [
        (("DMA-FQ", "identity"), ("iommu=pt",), True),
        (("identity", "none"), None, False),
        ((None, None), ("amd_iommu=off",), False),
        ((None, "identity"), (), None),
        ((), None, None),
    ],
)
def test_iommu_translation_needs_evidence(kinds, cmdline, expected) -> None:
    gpus = tuple(Gpu(index=i, name="a", iommu_type=kind) for i, kind in enumerate(kinds))
    assert iommu_translates(Machine(gpus=gpus, kernel_cmdline=cmdline)) is expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(None, None), ({}, False), ({"ForceP2P": "0x11"}, True), ({"ForceP2P": "?"}, None)],
)
def test_forced_p2p(keys, expected) -> None:
    assert forced_p2p(Machine(registry_dwords=keys)) is expected


def test_socket_of_follows_the_numa_node() -> None:
    two = machine("two-sockets")
    assert [socket_of(two, gpu) for gpu in two.gpus] == [0] * 4 + [1] * 4
    guest = machine("vm")
    assert socket_of(guest, guest.gpus[0]) == 0


def test_version_tuple() -> None:
    assert version_tuple("2.30.7+cuda13") == (2, 30, 7)
    assert version_tuple("nonsense") is None
    assert version_tuple(None) is None
