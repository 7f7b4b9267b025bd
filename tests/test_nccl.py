from __future__ import annotations

import random
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify.comm.nccl import LaunchFacts, NcclPlan, nccl_settings
from fastverify.comm.nccl_values import LEVELS, p2p_level
from fastverify.machine import Machine, classify
from fastverify.machine.facts import select
from tests.machines import machine, machines
from tests.sentences import check_refused

ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
IB = {"NCCL_IB_DISABLE": "1"}
RING = {"NCCL_ALGO": "Ring"}
STAGED = {"NCCL_P2P_DISABLE": "1", "NCCL_MIN_CTAS": "16", "NCCL_BUFFSIZE": "33554432"}
UPSTREAM = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}

# name, tp -> what is set for few users, for many, and what is remarked for few
TABLE = [
    ("one-switch", 1, ORDER, ORDER, []),
    ("one-switch", 4, ORDER, ORDER, []),
    ("two-switches", 4, ORDER, ORDER, []),
    ("two-switches", 8, {**ORDER, **RING, "NCCL_P2P_LEVEL": "PHB"}, None, ["p2p-not-probed"]),
    # Two GPUs on an AMD CPU: NCCL's own default reaches as far as needed.
    ("two-sockets", 2, {**ORDER, **IB}, None, []),
    ("two-sockets", 4, {**ORDER, **IB, "NCCL_P2P_LEVEL": "PHB"}, None, ["p2p-not-probed"]),
    (
        "two-sockets",
        8,
        {**ORDER, **IB, "NCCL_P2P_LEVEL": "SYS"},
        None,
        ["p2p-not-probed", "amd-socket-model"],
    ),
    ("four-islands", 2, ORDER, ORDER, []),
    ("four-islands", 4, {**ORDER, **RING, "NCCL_P2P_LEVEL": "PHB"}, None, ["p2p-not-probed"]),
    (
        "four-islands",
        8,
        {**ORDER, **RING, "NCCL_P2P_LEVEL": "SYS"},
        {**ORDER, **RING, **STAGED},
        ["p2p-not-probed"],
    ),
    ("laptop", 1, {}, {}, []),
    ("none", 1, {}, {}, []),
    ("h200", 1, {}, {}, []),
    ("two-h200", 2, ORDER, ORDER, []),
    ("vm", 4, {**ORDER, "NCCL_P2P_DISABLE": "1"}, None, []),
]


def plan(value: Machine, tp: int, env: dict[str, str] | None = None, **launch: object) -> NcclPlan:
    profile = launch.pop("profile", "latency")
    facts = LaunchFacts(**launch)
    return nccl_settings(value, classify(value, tp), tp, env or {}, profile, facts)


def codes(found: NcclPlan) -> list[str]:
    return [finding.code for finding in found.findings]


@pytest.mark.parametrize(("name", "tp", "few", "many", "remarks"), TABLE)
def test_recorded_machines(name, tp, few, many, remarks) -> None:
    found = plan(machine(name), tp)
    assert found.environment() == few
    assert codes(found) == remarks
    assert plan(machine(name), tp, profile="throughput").environment() == (
        few if many is None else many
    )


def test_what_sglang_writes_itself_is_shown_and_not_set() -> None:
    found = plan(machine("one-switch"), 4)
    assert {s.name: s.value for s in found.settings if s.source == "upstream"} == UPSTREAM
    assert not set(UPSTREAM) & set(found.environment())
    shown = {s.name: s.value for s in plan(machine("one-switch"), 4, symm_mem=True, dcp=4).settings}
    assert (shown["NCCL_CUMEM_ENABLE"], shown["NCCL_NVLS_ENABLE"]) == ("1", "1")
    assert shown["NCCL_GRAPH_MIXING_SUPPORT"] == "0"
    assert plan(machine("none"), 1).settings == ()


def _with(name: str, **changes: object) -> Machine:
    return msgspec.structs.replace(machine(name), **changes)


def _iommu(kind: str | None, cmdline: tuple[str, ...] | None = None) -> Machine:
    base = machine("two-sockets")
    gpus = tuple(msgspec.structs.replace(gpu, iommu_type=kind) for gpu in base.gpus)
    return msgspec.structs.replace(base, gpus=gpus, kernel_cmdline=cmdline)


def test_the_probe_verdict_decides_over_everything() -> None:
    for name, tp in (("one-switch", 4), ("two-sockets", 8), ("two-h200", 2), ("vm", 4)):
        failed = plan(machine(name), tp, peers=False)
        assert failed.environment()["NCCL_P2P_DISABLE"] == "1"
        assert "NCCL_P2P_LEVEL" not in failed.environment()
    proved = plan(_iommu("DMA-FQ"), 8, peers=True)
    assert proved.environment()["NCCL_P2P_LEVEL"] == "SYS"
    assert "iommu-translates" not in codes(proved)
    assert "NCCL_P2P_DISABLE" not in plan(machine("vm"), 4, peers=True).environment()


def test_a_translating_iommu_keeps_the_default() -> None:
    found = plan(_iommu("DMA-FQ"), 8)
    assert "NCCL_P2P_LEVEL" not in found.environment()
    assert "iommu-translates" in codes(found)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (_iommu(None), "iommu-unknown"),
        (_with("two-sockets", p2p_read=()), "p2p-grant-unknown"),
        (_with("two-sockets", links=()), "links-unknown"),
    ],
)
def test_missing_facts_set_nothing_and_say_so(value: Machine, code: str) -> None:
    found = plan(value, 8)
    assert not any(name.startswith("NCCL_P2P") for name in found.environment())
    assert {f.code: f.severity for f in found.findings}[code] == "unknown"


def test_a_refused_pair_keeps_the_default() -> None:
    base = machine("two-sockets")
    rows = [list(row) for row in base.p2p_read]
    rows[0][7] = "CNS"
    refused_pair = msgspec.structs.replace(base, p2p_read=tuple(map(tuple, rows)))
    found = plan(refused_pair, 8)
    assert "NCCL_P2P_LEVEL" not in found.environment()
    assert "p2p-not-granted" in codes(found)


def test_many_users_need_the_driver_keys_to_be_known() -> None:
    unread = _with("four-islands", registry_dwords=None)
    found = plan(unread, 8, profile="throughput")
    assert found.environment()["NCCL_P2P_LEVEL"] == "SYS"
    assert "driver-keys-unknown" in codes(found)


@pytest.mark.parametrize("env", [{"NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_DISABLE": "0"}])
def test_a_user_who_keeps_p2p_gets_no_staging_buffers(env: dict[str, str]) -> None:
    found = plan(machine("four-islands"), 8, env, profile="throughput")
    assert found.environment() == {**ORDER, **RING}


def test_two_group_sizes_keep_one_launch_order() -> None:
    base = machine("two-sockets")
    assert plan(base, 8, groups=(8, 4)).environment()["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    for other in (
        plan(base, 8, groups=(8, 8, 1)),
        plan(msgspec.structs.replace(base, nccl_version="2.25.1"), 8, groups=(8, 4)),
        plan(msgspec.structs.replace(base, cuda_driver_version="12.2"), 8, groups=(8, 4)),
        plan(msgspec.structs.replace(base, nccl_version=None), 8, groups=(8, 4)),
    ):
        assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in other.environment()


def test_several_hosts_keep_the_network() -> None:
    assert "NCCL_IB_DISABLE" not in plan(machine("two-sockets"), 8, nodes=2).environment()


def test_the_users_value_stays_and_shows_what_was_meant() -> None:
    env = {"NCCL_P2P_LEVEL": "PXB", "NCCL_ALGO": "Ring", "HOME": "x"}
    found = plan(machine("two-switches"), 8, env)
    rows = {s.name: s for s in found.settings}
    assert rows["NCCL_P2P_LEVEL"].value == "PXB"
    assert rows["NCCL_P2P_LEVEL"].source == "user"
    assert "fastverify would take PHB" in rows["NCCL_P2P_LEVEL"].reason
    assert rows["NCCL_ALGO"].reason == "set by the user"
    assert "HOME" not in rows
    assert found.environment() == ORDER


def test_old_names_answer_for_new_ones() -> None:
    found = plan(machine("four-islands"), 8, {"NCCL_MAX_NCHANNELS": "4"}, profile="throughput")
    assert "NCCL_MIN_CTAS" not in found.environment()


def test_unknown_profiles_are_refused() -> None:
    base = machine("none")
    check_refused(nccl_settings, base, classify(base, 1), 1, {}, "speed", says=("speed", "latency"))
    check_refused(nccl_settings, base, classify(base, 1), 0, {}, says=(0, 1))


@pytest.mark.parametrize("name", ["two-switches", "four-islands", "two-sockets"])
def test_gpu_order_does_not_change_the_settings(name: str) -> None:
    base, order = machine(name), list(range(8))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        shuffled = select(base, tuple(order))
        assert plan(shuffled, 8).environment() == plan(base, 8).environment()
        assert ("ranks-interleaved" in codes(plan(shuffled, 8))) is not classify(
            shuffled, 8
        ).adjacent


VALUES = ("", "0", "1", "2", "4", "16", "SYS", "sys", "NODE", "PHB", "LL", "^LL", "LL,LL128,Simple")
NAMES = (
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_PROTO",
    "NCCL_ALGO",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_GRAPH_FILE",
    "NCCL_UNHEARD_OF",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "LC_ALL",
)
environments = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(max_size=9)
)
launches = st.builds(
    LaunchFacts,
    groups=st.lists(st.integers(1, 16), max_size=3).map(tuple),
    nodes=st.integers(1, 2),
    peers=st.none() | st.booleans(),
    graph_text=st.none() | st.text(max_size=20),
    symm_mem=st.booleans(),
    nvls=st.booleans(),
    dcp=st.integers(1, 8),
)
profiles = st.sampled_from(("latency", "throughput"))


@given(machines(), st.integers(1, 12), environments, profiles, launches)
def test_properties_of_every_plan(value, tp, env, profile, launch) -> None:
    topology, before = classify(value, tp), dict(env)
    found = nccl_settings(value, topology, tp, env, profile, launch)
    assert env == before
    assert nccl_settings(value, topology, tp, dict(reversed(env.items())), profile, launch) == found
    names = [s.name for s in found.settings]
    assert names == sorted(set(names))
    for setting in found.settings:
        assert setting.reason.strip() and "\n" not in setting.reason.replace(setting.value, "")
        assert (setting.source == "user") == (setting.name in env)
        if setting.source == "user":
            assert setting.value == env[setting.name]
    ours = found.environment()
    assert not set(ours) & set(env)
    if "NCCL_P2P_LEVEL" in ours:
        assert ours["NCCL_P2P_LEVEL"] in LEVELS and "NCCL_P2P_DISABLE" not in ours
        assert p2p_level(ours["NCCL_P2P_LEVEL"]) == ours["NCCL_P2P_LEVEL"]
        assert topology.granted and launch.peers is not False
    assert "LL128" not in ours.get("NCCL_PROTO", "")
    for finding in found.findings:
        assert finding.text.endswith(".") and finding.code


@settings(max_examples=50)
@given(machines(), st.integers(1, 12), profiles)
def test_findings_are_single_sentences(value, tp, profile) -> None:
    for finding in nccl_settings(value, classify(value, tp), tp, {}, profile).findings:
        assert not re.search(r"[.!?]\s", finding.text), finding.text
