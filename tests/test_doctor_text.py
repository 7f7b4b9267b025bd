"""Texts of nvidia-smi, lspci, the kernel and the driver: versions, locales, damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify.doctor import hosttext, smi
from fastverify.doctor.collect import collect
from fastverify.doctor.diagnose import diagnose
from fastverify.doctor.live import acs_redirects
from fastverify.errors import ConfigError
from fastverify.logs.text import decode, read_text, to_number
from fastverify.machine.facts import LINK_CODE, P2P_CODE
from tests.sentences import check_refused

FOLDER = Path(__file__).parent / "data" / "reports"
CODES = st.sampled_from(["NV4", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])


def topo(links: list[list[str]], head: str = "", gap: str = "\t") -> str:
    names = gap.join(f"GPU{i}" for i in range(len(links)))
    rows = [
        f"GPU{i}{gap}" + gap.join(row) + f"{gap}0-31{gap}{i % 2}" for i, row in enumerate(links)
    ]
    return "\n".join(
        [
            head or f"{gap}{names}{gap}CPU Affinity{gap}NUMA Affinity",
            *rows,
            "",
            "Legend:",
            "  X = Self",
        ]
    )


@st.composite
def matrices(draw: st.DrawFn) -> list[list[str]]:
    count = draw(st.integers(1, 16))
    rows = [["X"] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            rows[i][j] = rows[j][i] = draw(CODES)
    return rows


@given(matrices(), st.sampled_from(["\t", "     ", " \t "]), st.booleans(), st.booleans())
def test_topology_tables_of_any_size(
    links: list[list[str]], gap: str, coloured: bool, windows: bool
) -> None:
    text = topo(links, gap=gap)
    if coloured:
        first, _, rest = text.partition("\n")
        text = f"\x1b[4m{first}\x1b[0m\n{rest}"
    if windows:
        text = text.replace("\n", "\r\n")
    found, numa = smi.parse_topo(decode(text.encode(), "topo"))
    assert [list(row) for row in found] == links
    assert numa == tuple(i % 2 for i in range(len(links)))


def test_a_translated_heading_and_network_cards_do_not_matter() -> None:
    text = (
        "\tGPU0\tGPU1\tNIC0\tCPU-Affinität\tNUMA-Affinität\n"
        "GPU0\t X \tNODE\tPIX\t0-31\t0\t\tN/A\nGPU1\tNODE\t X \tSYS\t32-63\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\t X \t\t\t\n"
    )
    links, numa = smi.parse_topo(text)
    assert links == (("X", "NODE"), ("NODE", "X"))
    assert numa == (0, 1)


def test_cells_that_ran_together_are_taken_apart() -> None:
    links, _ = smi.parse_topo("GPU0  X NODENODE\nGPU1 NODE X NODE\nGPU2 NODENODE X\n")
    assert links[0] == ("X", "NODE", "NODE")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("GPU0\tX\tPIX\nGPU1\tPIX", "cells"),
        ("GPU0\tX\tPIX\nGPU1\tSYS\tX", "back"),
        ("GPU0\tPIX\tX\nGPU1\tX\tPIX", "back"),
        ("GPU1\tX", "not numbered from 0"),
        ("GPU0\tX\tPIX\nGPU2\tPIX\tX", "not numbered from 0"),
    ],
)
def test_damaged_topology_is_refused(text: str, says: str) -> None:
    check_refused(smi.parse_topo, text, says=(says,))


def test_one_gpu_beside_its_network_card() -> None:
    assert smi.parse_topo("GPU0\tX\tPIX\n")[0] == (("X",),)


@pytest.mark.parametrize("code", ["OK", "CNS", "GNS", "TNS", "NS", "U", "DR", "XYZ"])
def test_unknown_peer_codes_count_as_refused(code: str, tmp_path: Path) -> None:
    table = f" \tGPU0\tGPU1\t\n GPU0\tX\t{code}\t\n GPU1\t{code}\tX\t\n\nLegend:\n  X = Self\n"
    assert smi.parse_p2p(table)[0][1] == code
    paths = [tmp_path / "p2p-r.txt", tmp_path / "p2p-w.txt"]
    for path in paths:
        path.write_text(table)
    codes = {finding.code for finding in diagnose(collect(paths))}
    assert ("peers-refused" in codes) == (code not in ("OK", "U"))


def query(
    current: str = "Current",
    power: str = "Power Draw",
    section: str = "GPU Power Readings",
    watt: str = "92.15 W",
) -> str:
    return f"""
==============NVSMI LOG==============

Driver Version                            : 595.71.05
CUDA Version                              : 13.2
GPU 00000000:01:00.0
    Product Name                          : NVIDIA RTX PRO 6000 Blackwell
    Display Active                        : Disabled
    MIG Mode
        Current                           : Enabled
        Pending                           : Enabled
    Serial Number                         : 1234567890123
    GPU UUID                              : GPU-01234567-89ab
    PCI
        Bus Id                            : 00000000:01:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                {current:<26}: 1
            Link Width
                Max                       : 16x
                Current                   : 8x
    FB Memory Usage
        Total                             : 97887 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
    Utilization
        GPU                               : 100 %
    {section}
        {power:<34}: {watt}
        Current Power Limit               : 600.00 W
"""


@pytest.mark.parametrize(
    ("current", "power", "section", "watt"),
    [
        ("Current", "Power Draw", "Power Readings", "92.15 W"),
        ("Device Current", "Average Power Draw", "GPU Power Readings", "92,15 W"),
        ("Current", "Instantaneous Power Draw", "GPU Power Readings", "92.15 W"),
    ],
)
def test_queries_of_several_driver_versions(
    current: str, power: str, section: str, watt: str, tmp_path: Path
) -> None:
    path = tmp_path / "q.txt"
    path.write_text(query(current, power, section, watt))
    evidence = collect([path])
    (gpu,) = evidence.machine.gpus
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (1, 5, 8, 16)
    assert gpu.memory_bytes == 97887 << 20
    assert evidence.samples == (smi.Sample(0, 100, 92.15, 600),)
    assert evidence.mig == (0,)
    codes = {finding.code for finding in diagnose(evidence)}
    assert {"spin-wait", "mig"} <= codes


def test_serials_and_uuids_do_not_reach_the_evidence(tmp_path: Path) -> None:
    path = tmp_path / "q.txt"
    path.write_text(query())
    shown = repr(collect([path]))
    assert "1234567890123" not in shown and "GPU-0123" not in shown


def test_an_environment_keeps_only_what_matters(tmp_path: Path) -> None:
    path = tmp_path / "env.txt"
    path.write_text("USER=someone\nHOME=/home/someone\nexport NCCL_PROTO='LL'\nAPI_KEY=secret\n")
    assert collect([path]).environ == {"NCCL_PROTO": "LL"}


def test_csv_with_decimal_commas_is_refused_not_misread() -> None:
    text = "index, power.draw [W]\n0, 92,15 W\n"
    check_refused(smi.parse_csv, text, says=("LC_ALL=C",))
    assert smi.parse_csv("index, power.draw [W]\n0, 92.15 W\n")[0]["power.draw"] == "92.15 W"


def test_acs_is_unknown_without_root_and_never_fine() -> None:
    text = (FOLDER / "R44-lspci.txt").read_text()
    hidden = "\n".join(
        line if "Capabilities" not in line else "\tCapabilities: <access denied>"
        for line in text.split("\n")
        if "ACS" not in line
    )
    assert [b.redirects for b in hosttext.parse_lspci(text)] == [True, True]
    assert [b.redirects for b in hosttext.parse_lspci(hidden)] == [None, None]


@pytest.mark.parametrize(
    ("control", "redirects"),
    [(0x00, False), (0x1D, True), (0x04, True), (0x08, True), (0x11, False)],
)
def test_acs_from_configuration_space(control: int, redirects: bool) -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x150 << 20).to_bytes(4, "little")
    config[0x150:0x154] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[0x156] = control
    assert acs_redirects(bytes(config)) is redirects
    assert acs_redirects(bytes(config[:64])) is None
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")  # a loop
    assert acs_redirects(bytes(config)) is False


def test_driver_keys_come_from_params_only() -> None:
    keys, bar = hosttext.parse_params(
        'EnableResizableBar: 1\nRegistryDwords: "ForceP2P=0x11;A=1"\n'
    )
    assert keys == {"ForceP2P": "0x11", "A": "1"} and bar is True
    check_refused(hosttext.parse_params, "EnableResizableBar: 1\n", says=("RegistryDwords",))


def test_kernel_logs() -> None:
    log = hosttext.parse_kernel_log(
        "NVRM: Xid (PCI:0000:01:00): 43, pid=1\nAMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1]\n"
        "pcieport 0000:00:01.1: AER: Corrected error received\n"
    )
    assert log.xids == ((43, 1),) and log.dma_faults == 1 and log.corrected == 1
    assert hosttext.parse_kernel_log("hello") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("92,15 W", 92.15), ("92.15 W", 92.15), ("16x", 16), ("[N/A]", None), ("", None)],
)
def test_numbers_of_cells(text: str, value: float | None) -> None:
    assert to_number(text) == value


def test_files_that_are_no_text(tmp_path: Path) -> None:
    cases = {"empty": b"", "blank": b" \n", "binary": bytes(range(256)) * 8, "zip": b"PK\3\4\0\0"}
    for name, data in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        check_refused(collect, [path], says=("empty" if name in ("empty", "blank") else "binary",))
    check_refused(collect, [tmp_path / "absent"], says=("No such file",))
    check_refused(collect, [tmp_path], says=("cannot be read",))
    foreign = tmp_path / "poem.txt"
    foreign.write_text("the owl and the pussycat went to sea\n")
    check_refused(collect, [foreign], says=("no known kind",))
    strange = tmp_path / "strange.json"
    strange.write_text('{"a": 1}')
    check_refused(collect, [strange], says=("machine file",))


def test_other_encodings_are_read(tmp_path: Path) -> None:
    text = (FOLDER / "R25-topo.txt").read_text()
    for encoding in ("utf-16", "utf-8-sig", "latin-1"):
        path = tmp_path / encoding
        path.write_bytes(text.replace("Self", "S\xe9lf").encode(encoding))
        assert len(collect([path]).machine.gpus) == 2


def test_a_huge_log_is_read_at_both_ends_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastverify.logs.text.HEAD_BYTES", 1000)
    monkeypatch.setattr("fastverify.logs.text.TAIL_BYTES", 3000)
    path = tmp_path / "huge.log"
    middle = "".join(f"line {number}\n" for number in range(5000))
    path.write_text("server_args=ServerArgs(a=1)\n" + middle + "[TP0] CUDA out of memory\n")
    text = read_text(path)
    assert text.skipped == path.stat().st_size - 4000
    assert text.body.startswith("server_args=") and text.body.endswith("out of memory\n")
    assert len(text.body) == 4001
    codes = {finding.code for finding in diagnose(collect([path]))}
    assert {"file-cut", "out-of-memory"} <= codes


PIECES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".json")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PIECES), st.data())
def test_damaged_files_never_raise_anything_else(path: Path, data: st.DataObject) -> None:
    """Cuts, swaps and noise in real fixtures."""
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(raw)))
        if data.draw(st.booleans()):
            del raw[place : place + data.draw(st.integers(0, 200))]
        else:
            raw[place:place] = data.draw(st.binary(max_size=20))
    _read_or_refuse(bytes(raw))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "GPU0",
                "X",
                "\t",
                "\n",
                "OK",
                "PIX",
                "SYS",
                ":",
                "sglang:a",
                "1",
                "{",
                "}",
                "nan",
                "=",
            ]
            + [
                "NCCL INFO ",
                "Pattern 4, ",
                "Decode batch",
                "accept len: ",
                "#running-req: ",
                "bs=[",
            ]
            + ["GPU 00000000:01:00.0\n", "RegistryDwords:", "00:01.0 PCI bridge", '"measurements"']
        )
        | st.text(max_size=8),
        max_size=40,
    ).map("".join)
)
def test_word_salad_never_raises_anything_else(text: str) -> None:
    _read_or_refuse(text.encode("utf-8", errors="replace"))


def _read_or_refuse(raw: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        try:
            evidence = collect([file.name])
        except ConfigError as error:
            assert str(error) == " ".join(str(error).split())
            return
        for finding in diagnose(evidence):
            assert finding.text.endswith(".")
        if evidence.machine is not None:
            for row in evidence.machine.links:
                assert all(LINK_CODE.fullmatch(cell) for cell in row)
            for row in (*evidence.machine.p2p_read, *evidence.machine.p2p_write):
                assert all(P2P_CODE.fullmatch(cell) for cell in row)
