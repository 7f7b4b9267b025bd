"""Checks of machines: whole kinds, never a confident answer from missing facts."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify.comm.nccl import LaunchFacts, nccl_settings
from fastverify.comm.probe import Proof
from fastverify.doctor.diagnose import cheap_findings, diagnose, exit_code, ranked
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.hosttext import Bridge, KernelLog
from fastverify.doctor.measured import Measured, merge_measured, parse_measured
from fastverify.doctor.probing import from_proof, run_probe
from fastverify.doctor.report import SCREEN_LINES, report_lines, summary
from fastverify.doctor.smi import Sample
from fastverify.machine.facts import Machine, NumaNode
from fastverify.machine.finding import Finding
from fastverify.machine.topology import classify
from tests.machines import NAMES, machine, machines
from tests.sentences import check_refused


def codes(evidence: Evidence) -> dict[str, Finding]:
    return {finding.code: finding for finding in diagnose(evidence)}


def whole(found: Machine, **more: object) -> Evidence:
    return Evidence(machine=found, complete=True, environ={}, **more)  # type: ignore[arg-type]


def probe(count: int, failing: dict[tuple[int, int], str]) -> Measured:
    rows = [
        ["-" if i == j else failing.get((i, j), "ok") for j in range(count)] for i in range(count)
    ]
    return Measured(probe=tuple(tuple(row) for row in rows))  # type: ignore[arg-type]


CELLS = st.sampled_from(["ok", "wrong", "timeout", "unmappable", "unread"])


@settings(max_examples=150, deadline=None)
@given(machines(), st.data())
def test_any_machine_gets_whole_sentences(found: Machine, data: st.DataObject) -> None:
    count = len(found.gpus)
    cells = [(i, j) for i in range(count) for j in range(count) if i != j]
    measured = Measured()
    if cells and data.draw(st.booleans()):
        measured = probe(count, {cell: data.draw(CELLS) for cell in cells[:6]})
    evidence = whole(found, measured=measured, kernel=KernelLog(xids=((79, 1),), corrected=3))
    findings = diagnose(evidence)
    for finding in findings:
        assert re.fullmatch(r"[^\n]+\.", finding.text)
        assert not re.search(r"[.!?]\s", finding.text), finding.text
        assert not re.search(r"\bNone\b|\[\]|\(\)", finding.text), finding.text
    order = ["fail", "warn", "unknown", "info"]
    severities = [order.index(finding.severity) for finding in findings]
    assert severities == sorted(severities)
    assert len(report_lines("title", findings, 100, False)) <= SCREEN_LINES
    assert diagnose(evidence) == findings


@settings(max_examples=100, deadline=None)
@given(machines())
def test_nothing_read_means_nothing_judged(found: Machine) -> None:
    """With every fact removed, only the absence of facts may be reported."""
    blank = Machine(
        gpus=tuple(msgspec.structs.replace(g, iommu_type=None) for g in found.gpus),
        installed=found.installed,
        unknown=("links: nvidia-smi topo -m",),
    )
    findings = [f for f in diagnose(whole(blank)) if f.code not in ("gpu-mixed", "nccl-would-set")]
    assert all(f.severity in ("unknown", "info") for f in findings), findings
    if len(found.gpus) > 1:
        assert any(f.severity == "unknown" for f in findings)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machines(name: str) -> None:
    found = codes(whole(machine(name)))
    if len(machine(name).gpus) < 2:
        assert not {"acs-unknown", "peers-unproved", "bar1-small"} & set(found)
    loud = {code for code, finding in found.items() if finding.severity in ("fail", "warn")}
    expected = {
        "vm": {"peers-refused"},
        "four-islands": set(),
        "two-sockets": set(),
        "two-switches": set(),
    }
    assert loud == expected.get(name, loud)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("timeout", "peers-not-delivered"),
        ("wrong", "peers-wrong-data"),
        ("unmappable", "peers-not-mappable"),
    ],
)
def test_a_grant_without_delivery_is_a_failure(count: int, cell: str, code: str) -> None:
    granted = machine("two-switches")
    found = codes(
        whole(
            msgspec.structs.replace(
                granted,
                gpus=granted.gpus[:count],
                links=tuple(row[:count] for row in granted.links[:count]),
                p2p_read=tuple(row[:count] for row in granted.p2p_read[:count]),
                p2p_write=tuple(row[:count] for row in granted.p2p_write[:count]),
            ),
            measured=probe(count, {(count - 1, 0): cell}),
        )
    )
    assert found[code].severity == "fail"
    assert f"GPU 0-{count - 1}:" in found[code].text
    assert "although the driver grants" in found[code].text
    assert "peers-proved" not in found
    assert "NCCL_P2P_DISABLE=1" in found["nccl-would-set"].text


def test_a_passed_probe_ends_the_doubt() -> None:
    found = codes(whole(machine("two-switches"), measured=probe(8, {})))
    assert "peers-proved" in found
    assert not {"peers-unproved", "acs-unknown"} & set(found)


def test_an_unread_pair_proves_nothing() -> None:
    found = codes(whole(machine("two-switches"), measured=probe(8, {(0, 1): "unread"})))
    assert "peers-proved" not in found


@pytest.mark.parametrize("switch", ["ok", "timeout"])
def test_acs_is_suspected_only_when_near_pairs_alone_fail(switch: str) -> None:
    near = {(i, j): "timeout" for i in range(4) for j in range(4) if i != j}
    far = {(0, 7): "timeout"} if switch == "timeout" else {}
    found = codes(whole(machine("two-switches"), measured=probe(8, near | far)))
    assert ("close-pairs-fail" in found) == (switch == "ok")


@pytest.mark.parametrize(
    ("redirects", "code"), [(True, "acs-redirect"), (None, "acs-unknown"), (False, None)]
)
def test_bridges_above_the_gpus(redirects: bool | None, code: str | None) -> None:
    found = machine("two-switches")
    ours = found.gpus[0].upstream[-1]
    bridges = (
        Bridge(ours, "Downstream Port", redirects),
        Bridge("0000:ff:00.0", "Root Port", True),
    )
    present = {"acs-redirect", "acs-unknown"} & set(codes(whole(found, bridges=bridges)))
    assert present == ({code} if code else set())


@pytest.mark.parametrize(
    ("util", "code"), [(99.0, "pcie-slow"), (0.0, "pcie-idle"), (None, "pcie-idle")]
)
def test_a_slow_link_is_a_fault_only_under_load(util: float | None, code: str) -> None:
    found = machine("two-switches")
    slow = (msgspec.structs.replace(found.gpus[0], pcie_gen=1), *found.gpus[1:])
    evidence = whole(
        msgspec.structs.replace(found, gpus=slow), samples=(Sample(0, util, 300, 600),)
    )
    assert {"pcie-slow", "pcie-idle"} & set(codes(evidence)) == {code}


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_narrow_slots(lanes: int) -> None:
    found = machine("two-switches")
    narrow = (msgspec.structs.replace(found.gpus[2], pcie_width=lanes),)
    gpus = (*found.gpus[:2], *narrow, *found.gpus[3:])
    text = codes(whole(msgspec.structs.replace(found, gpus=gpus)))["pcie-narrow"].text
    assert f"GPU 2 runs {lanes} of 16" in text
    assert "pcie-narrow" not in codes(whole(found))


def test_binding_away_from_the_gpu() -> None:
    found = msgspec.structs.replace(
        machine("two-sockets"), numa_nodes=(NumaNode(0, "0-3,8-11", 0), NumaNode(1, "4-7", 1))
    )
    assert "numa-binding" in codes(whole(found, cpus=(0, 1)))
    assert "numa-binding" not in codes(whole(found, cpus=(0, 5)))
    assert "numa-binding" not in codes(whole(found, cpus=None))


@pytest.mark.parametrize("kind", ["none", "vm", "wsl"])
def test_bar1_in_a_guest_is_not_evidence(kind: str) -> None:
    found = machine("two-switches")
    gpus = tuple(msgspec.structs.replace(gpu, bar1_bytes=256 << 20) for gpu in found.gpus)
    seen = codes(whole(msgspec.structs.replace(found, gpus=gpus, virtualisation=kind)))
    assert ("bar1-small" in seen, "bar1-untrusted" in seen) == (kind == "none", kind != "none")


@pytest.mark.parametrize(
    ("keys", "code"),
    [({}, "forced-p2p-off"), ({"ForceP2P": "0x11"}, "driver-keys"), (None, "driver-keys-unknown")],
)
def test_driver_keys_of_root_port_cards(keys: dict[str, str] | None, code: str) -> None:
    found = msgspec.structs.replace(machine("two-sockets"), registry_dwords=keys)
    known = {"forced-p2p-off", "driver-keys", "driver-keys-unknown"}
    assert known & set(codes(whole(found))) == {code}


def test_the_launcher_hears_only_what_matters_and_quickly() -> None:
    found = msgspec.structs.replace(
        machine("two-sockets"),
        registry_dwords={},
        gpus=tuple(
            msgspec.structs.replace(g, iommu_type="DMA") for g in machine("two-sockets").gpus
        ),
    )
    start = time.perf_counter()
    heard = cheap_findings(found, {}, 8)
    assert time.perf_counter() - start < 0.3
    assert {f.code for f in heard} == {"forced-p2p-off", "iommu-translates"}
    assert all(f.severity in ("fail", "warn") for f in heard)
    planned = nccl_settings(found, classify(found, 8), 8, {}, "latency", LaunchFacts()).findings
    assert {f.code for f in cheap_findings(found, {}, 8, planned)} == {"forced-p2p-off"}
    assert cheap_findings(machine("none"), {}) == ()


def test_exit_codes() -> None:
    def of(*severities: str) -> int:
        return exit_code([Finding(s, "x", "x.") for s in severities])  # type: ignore[arg-type]

    assert [of(), of("info"), of("unknown"), of("info", "warn"), of("warn", "fail")] == [
        0,
        0,
        0,
        1,
        2,
    ]


def test_the_screen_says_how_much_it_leaves_out() -> None:
    many = ranked(Finding("warn", f"w{n}", f"number {n} is wrong; mend it.") for n in range(60))
    lines = [text for _, text in report_lines("title", many, 100, False)]
    assert len(lines) == SCREEN_LINES
    assert "--all" in lines[-1] and "more" in lines[-1]
    assert len(report_lines("title", many, 100, True)) > 60
    assert summary(many) == "60 warnings"
    for width in (70, 100, 200):
        assert all(len(text) <= width for _, text in report_lines("t" * 300, many, width, False))


# The probe


@dataclass
class Fake:
    """A proof with one failure of each wording."""

    failure: str
    cell: str | None


@pytest.mark.parametrize(
    "fake",
    [
        Fake("GPU 0 could not write to GPU 2 (timed out)", "timeout"),
        Fake("GPU 0 could not write to GPU 2 (invalid argument)", "unmappable"),
        Fake("GPU 0 wrote 4096 bytes to GPU 2, which sees 12 of them wrong", "wrong"),
        Fake("what GPU 0 wrote to GPU 2 changed later", "wrong"),
        Fake("GPU 2 stopped answering (EOFError)", None),
        Fake("GPU 9 could not write to GPU 2 (x)", None),
    ],
)
def test_proofs_become_pairs(fake: Fake) -> None:
    probed = from_proof(Proof("key", 3, (fake.failure,)))
    if fake.cell is None:
        assert [note.severity for note in probed.notes] == ["fail"]
        assert not any("ok" in row for row in probed.measured.probe)
    else:
        assert probed.measured.probe[0][2] == fake.cell
        assert not probed.notes
    whole_proof = from_proof(Proof("key", 3))
    assert {cell for row in whole_proof.measured.probe for cell in row} == {"-", "ok"}


def test_one_gpu_needs_no_probe() -> None:
    assert [note.code for note in run_probe(machine("laptop")).notes] == ["probe-not-run"]


# Measurements


def test_measurement_files_name_the_field_that_is_wrong() -> None:
    check_refused(parse_measured, '{"measurements": 1, "stepz": []}', "m.json", says=("stepz",))
    check_refused(
        parse_measured, '{"measurements": 1, "free_rows": -1}', "m.json", says=("free_rows",)
    )
    check_refused(parse_measured, '{"measurements": 2}', "m.json", says=("2", "1"))
    check_refused(parse_measured, '{"measurements": 1', "m.json", says=("m.json",))
    square = '{"measurements": 1, "probe": [["-", "ok"]]}'
    check_refused(parse_measured, square, "m.json", says=("not square",))


def test_measurements_of_several_files_are_laid_over_each_other() -> None:
    one = Measured(free_rows=4, drafts=3)
    merged = merge_measured([one, Measured(drafts=2)])
    assert (merged.free_rows, merged.drafts) == (4, 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("step", [0, 3])
def test_the_rank_that_disagrees_is_named_first(ranks: int, step: int) -> None:
    plans = [["pcie"] * 6 for _ in range(ranks)]
    plans[ranks - 1][step] = "nccl"
    measured = Measured(ranks=tuple(map(tuple, plans)))
    text = codes(Evidence(measured=measured))["ranks-disagree"].text
    assert text.startswith(
        f"at step {step} rank {ranks - 1} " if ranks > 2 else f"at step {step} rank"
    )


@pytest.mark.parametrize(("batch", "side"), [(1, "custom"), (2, "NCCL")])
def test_the_crossover_is_counted_in_verify_rows(batch: int, side: str) -> None:
    crossover = {"limit_bytes": 49152, "hidden": 6144, "drafts": 3, "batches": [batch]}
    text = json.dumps({"measurements": 1, "crossover": crossover})
    evidence = Evidence(measured=parse_measured(text, "m"))
    assert side in codes(evidence)["crossover-verify"].text


def test_latency_in_proportion_to_size_is_staging_and_a_flat_start_is_not() -> None:
    def seen(points: list[list[float]]) -> set[str]:
        body = msgspec.json.encode(
            {"measurements": 1, "curves": [{"variant": "one-shot", "points": points}]}
        )
        return set(codes(Evidence(measured=parse_measured(body.decode(), "m"))))

    assert "staged-peer-loads" in seen([[1024, 9], [32768, 75], [116736, 242]])
    assert "staged-peer-loads" not in seen([[1024, 6.1], [32768, 9.2], [131072, 17.6]])


@given(st.lists(st.integers(1, 500), min_size=3, max_size=8))
@settings(deadline=None, max_examples=50)
def test_equal_histograms_raise_no_alarm(counts: list[int]) -> None:
    same = codes(Evidence(measured=Measured(accept_histograms=(tuple(counts), tuple(counts)))))
    assert "acceptance-same" in same
    shifted = ((10_000, *counts), (*counts, 10_000))
    changed = codes(Evidence(measured=Measured(accept_histograms=shifted)))
    assert "acceptance-changed" in changed
