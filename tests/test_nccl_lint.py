from __future__ import annotations

import re

import msgspec
import pytest

from fastverify.comm.nccl import LaunchFacts, nccl_settings
from fastverify.machine import Machine, classify
from fastverify.machine.facts import select
from fastverify.machine.finding import Finding
from tests.machines import machine
from tests.test_nccl_graph import graph


def lint(env: dict[str, str], name: str | Machine = "two-sockets", tp: int = 8, **more: object):
    value = machine(name) if isinstance(name, str) else name
    profile = more.pop("profile", "latency")
    topology = classify(value, tp)
    found = nccl_settings(value, topology, tp, env, profile, LaunchFacts(**more))
    silent = nccl_settings(value, topology, tp, {}, profile, LaunchFacts(**more)).findings
    for finding in found.findings:
        assert not re.search(r"[.!?]\s", finding.text), finding.text
    return {f.code: f for f in found.findings if f not in silent}


def only(found: dict[str, Finding], severity: str, code: str, *words: str) -> None:
    assert list(found) == [code]
    assert found[code].severity == severity
    for word in words:
        assert word in found[code].text


# Environment that is fine, or one remark with its severity and words.
FINE = [
    {},
    {"NCCL_P2P_LEVEL": "SYS"},
    {"NCCL_P2P_LEVEL": ""},
    {"NCCL_PROTO": "^LL128"},
    {"NCCL_PROTO": "LL,Simple"},
    {"NCCL_PROTO": ""},
    {"NCCL_BUFFSIZE": "8388608"},
    {"NCCL_MIN_CTAS": "4", "NCCL_MAX_CTAS": "4"},
    {"NCCL_TUNER_PLUGIN": "none"},
    {"NCCL_GRAPH_MIXING_SUPPORT": "1"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
    {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
    {"NCCL_DEBUG": "INFO"},
]
REMARKS = [
    ({"NCCL_P2P_LEVEL": "sys"}, "warn", "p2p-level-ignored", "sys"),
    ({"NCCL_P2P_LEVEL": "NODE"}, "warn", "p2p-level-ignored", "NODE"),
    ({"NCCL_P2P_LEVEL": "4"}, "info", "p2p-level-number", "means SYS"),
    ({"NCCL_P2P_LEVEL": "2"}, "info", "p2p-level-number", "means PXB"),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, "warn", "p2p-contradiction", "SYS"),
    ({"NCCL_P2P_DISABLE": "true"}, "warn", "not-a-number", "read as 0"),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "fail", "shm-contradiction", "unset"),
    ({"NCCL_SHM_DISABLE": "1"}, "warn", "shm-disabled", "fallback"),
    ({"NCCL_P2P_LEVEL": "PXB", "NCCL_SHM_DISABLE": "1"}, "fail", "shm-contradiction", "unset"),
    ({"NCCL_PROTO": "LL,LL128,Simple"}, "warn", "proto-ll128-forced", "LL128"),
    ({"NCCL_PROTO": "^LL"}, "warn", "proto-ll128-forced", "^LL"),
    (
        {"NCCL_PROTO": "LL;allgather:LL128,Simple;allreduce:Simple"},
        "warn",
        "proto-ll128-forced",
        "",
    ),
    ({"NCCL_PROTO": "LL"}, "info", "proto-ll-only", "prefill"),
    ({"NCCL_PROTO": "LL, Simple"}, "warn", "proto-unknown", "' Simple'"),
    ({"NCCL_PROTO": "Simple;allreduce:^LL,LL128,Simple"}, "fail", "proto-none", "no protocol"),
    ({"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "4"}, "warn", "channels-contradiction", "MAX_CTAS=4"),
    ({"NCCL_MAX_CTAS": "0"}, "warn", "channels-invalid", "=0"),
    ({"NCCL_MIN_CTAS": "many"}, "warn", "channels-invalid", "many"),
    ({"NCCL_MIN_NCHANNELS": "4"}, "info", "renamed", "use NCCL_MIN_CTAS"),
    ({"NCCL_BUFFSIZE": "4000000"}, "warn", "buffsize-invalid", "4000000"),
    ({"NCCL_BUFFSIZE": "4M"}, "warn", "buffsize-invalid", "4M"),
    ({"NCCL_BUFFSIZE": "4,194,304"}, "warn", "buffsize-invalid", "4,194,304"),
    ({"NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1"}, "info", "network-only", "no effect"),
    ({"NCCL_NET_GDR_LEVEL": "SYS"}, "info", "network-only", "no effect"),
    ({"NCCL_TUNER_PLUGIN": "libtuner.so"}, "info", "tuner-plugin", "libtuner.so"),
    ({"NCCL_GRAPH_MIXING_SUPPORT": "0"}, "warn", "graph-mixing-off", "verify"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "info", "overwritten", "32"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "warn", "allocator-ipc", "IPC"),
    ({"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:true"}, "warn", "allocator-ipc", "IPC"),
    ({"VLLM_NCCL_SO_PATH": "libnccl.so"}, "info", "nccl-path-unread", "SGLANG_NCCL_SO_PATH"),
    ({"NCCL_GRAPH_FILE": "graph.xml"}, "unknown", "graph-file-unread", "checked"),
]


@pytest.mark.parametrize("env", FINE, ids=str)
def test_a_sound_environment_gets_no_remark(env: dict[str, str]) -> None:
    assert lint(env) == {}


@pytest.mark.parametrize(("env", "severity", "code", "word"), REMARKS, ids=str)
def test_one_doubtful_variable_gets_one_remark(env, severity, code, word) -> None:
    only(lint(env), severity, code, word)


@pytest.mark.parametrize(("env", "severity", "code", "word"), REMARKS, ids=str)
@pytest.mark.parametrize("locale", ["C", "tr_TR.UTF-8", "de_DE.UTF-8"])
def test_locale_and_order_of_variables_do_not_matter(env, severity, code, word, locale) -> None:
    around = {"LC_ALL": locale, **dict(reversed(env.items())), "LANG": locale}
    only(lint(around), severity, code, word)


def test_ll128_is_fine_over_nvlink() -> None:
    assert lint({"NCCL_PROTO": "LL,LL128,Simple"}, "two-h200", 2) == {}


def test_ll_alone_is_worse_for_many_users() -> None:
    assert lint({"NCCL_PROTO": "LL"}, profile="throughput")["proto-ll-only"].severity == "warn"


def test_disabling_p2p_wastes_nvlink() -> None:
    only(lint({"NCCL_P2P_DISABLE": "1"}, "two-h200", 2), "warn", "nvlink-unused")


def test_a_level_that_defies_a_failed_probe() -> None:
    only(lint({"NCCL_P2P_LEVEL": "SYS"}, peers=False), "fail", "p2p-probe-failed", "SYS")


def test_both_names_of_a_bound() -> None:
    env = {"NCCL_MAX_NCHANNELS": "8", "NCCL_MAX_CTAS": "4", "NCCL_MIN_CTAS": "6"}
    found = lint(env)
    assert {code: f.severity for code, f in found.items()} == {
        "renamed": "warn",
        "channels-contradiction": "warn",
    }


def test_network_variables_matter_on_several_hosts() -> None:
    assert lint({"NCCL_NET_GDR_LEVEL": "SYS"}, nodes=2) == {}


def test_flags_that_overwrite_the_users_value() -> None:
    found = lint({"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}, symm_mem=True)
    only(found, "warn", "overwritten")
    assert lint({"NCCL_CUMEM_ENABLE": "1"}, symm_mem=True) == {}
    assert lint({"NCCL_CUMEM_ENABLE": "0"}) == {}


@pytest.mark.parametrize(
    ("groups", "expected"), [((8,), []), ((8, 4), ["graph-file-size"]), ((), [])]
)
def test_a_graph_file_against_the_groups(groups, expected) -> None:
    found = lint({"NCCL_GRAPH_FILE": "g.xml"}, groups=groups, graph_text=graph(8))
    assert list(found) == expected


def test_a_graph_file_of_other_gpus() -> None:
    half = select(machine("two-sockets"), (4, 5, 6, 7))
    found = lint({"NCCL_GRAPH_FILE": "g.xml"}, half, 4, graph_text=graph(4))
    only(found, "fail", "graph-file-device", "0, 1, 2, 3")


def _findings(value: Machine, tp: int, env: dict[str, str] | None = None) -> dict[str, Finding]:
    found = nccl_settings(value, classify(value, tp), tp, env or {})
    return {f.code: f for f in found.findings}


@pytest.mark.parametrize(
    ("version", "severity", "code"),
    [
        ("2.25.1", "fail", "nccl-too-old"),
        ("2.26.2", "fail", "nccl-known-bad"),
        (None, "unknown", "nccl-version-unknown"),
        ("2.26.5", None, None),
        ("2.29.7", None, None),
        ("2.30.7+cuda13", None, None),
    ],
)
def test_the_loaded_nccl_against_the_gpu(version, severity, code) -> None:
    value = msgspec.structs.replace(machine("one-switch"), nccl_version=version)
    found = _findings(value, 4)
    assert {c: f.severity for c, f in found.items()} == ({code: severity} if code else {})
    # One rank runs no collective, and Hopper needs no minimum.
    assert _findings(value, 1) == {}
    assert _findings(msgspec.structs.replace(machine("two-h200"), nccl_version=version), 2) == {}


def test_two_nccl_packages_are_named() -> None:
    both = ("nvidia-nccl-cu12==2.27.5", "nvidia-nccl-cu13==2.30.7")
    found = _findings(msgspec.structs.replace(machine("two-h200"), nccl_packages=both), 2)
    assert found["nccl-two-packages"].severity == "fail"
    assert all(name in found["nccl-two-packages"].text for name in both)


@pytest.mark.parametrize(
    ("shm", "ranks", "env", "code"),
    [
        (64 << 20, 8, {"NCCL_P2P_DISABLE": "1"}, "shm-small"),
        (64 << 20, 4, {"NCCL_P2P_DISABLE": "1"}, "shm-small"),
        (8 << 30, 8, {"NCCL_P2P_DISABLE": "1"}, None),
        (64 << 20, 8, {"NCCL_P2P_LEVEL": "PHB"}, "shm-small"),
        (64 << 20, 8, {}, None),
        (1 << 30, 8, {"NCCL_P2P_DISABLE": "1", "NCCL_MIN_CTAS": "16"}, "shm-small"),
        (None, 8, {"NCCL_P2P_DISABLE": "1"}, "shm-unknown"),
    ],
)
def test_shared_memory_is_needed_where_p2p_is_off(shm, ranks, env, code) -> None:
    value = msgspec.structs.replace(machine("two-sockets"), shm_bytes=shm)
    found = {c for c in _findings(value, ranks, env) if c.startswith("shm")}
    assert found == ({code} if code else set())


def test_uuids_get_the_indices_to_write_instead() -> None:
    part = select(machine("two-sockets"), (2, 3))
    found = _findings(part, 2, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})
    assert found["visible-uuid"].severity == "fail"
    assert "write 2,3." in found["visible-uuid"].text


def test_interleaved_islands_get_an_order() -> None:
    mixed = select(machine("two-switches"), (0, 4, 1, 5, 2, 6, 3, 7))
    text = _findings(mixed, 8)["ranks-interleaved"].text
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in text


def test_device_numbers_of_several_models_need_an_order() -> None:
    base = machine("one-switch")
    older = msgspec.structs.replace(base.gpus[3], name="RTX 4090", compute_capability=(8, 9))
    value = msgspec.structs.replace(base, gpus=(*base.gpus[:3], older))
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert "visible-order" in _findings(value, 4, env)
    assert "visible-order" not in _findings(value, 4, {**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
