"""Server logs and NCCL output: what is read from them and what it is taken to mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastverify.doctor.diagnose import diagnose
from fastverify.doctor.evidence import Evidence
from fastverify.logs.cli import logs_main
from fastverify.logs.nccl import parse_nccl
from fastverify.logs.server import parse_server
from fastverify.logs.troubles import _HINTS, MEANINGS, trouble_in
from tests.sentences import check_refused

FOLDER = Path(__file__).parent / "data" / "reports"
ARGS = (
    "[2026-09-01 12:00:00] server_args=ServerArgs(model_path='m', tp_size=8,"
    " speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_num_draft_tokens=4)\n"
)
CAPTURE = (
    "[2026-09-01 12:01:00 TP0] Capture target verify CUDA graph begin. backend=full,"
    " num_tokens_per_req=4, avail mem=9.00 GB\n"
    "[2026-09-01 12:01:09 TP0] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=9.00 s,"
    " mem usage=1.00 GB, avail mem=8.00 GB.\n"
)


def decode(running: int, graph: object, length: float | None = None, speed: float = 100.0) -> str:
    spec = (
        "" if length is None else f"accept len: {length:.2f}, accept rate: {(length - 1) / 3:.2f}, "
    )
    return (
        f"[2026-09-01 12:02:00 TP0] Decode batch, #running-req: {running}, #token: 9410, token"
        f" usage: 0.04, {spec}cuda graph: {graph}, gen throughput (token/s): {speed:.2f},"
        " #queue-req: 0\n"
    )


def found(text: str) -> dict[str, str]:
    """Codes and sentences of the findings of one log."""
    log, nccl = parse_server(text), parse_nccl(text)
    return {f.code: f.text for f in diagnose(Evidence(servers=(log,) if log else (), nccl=nccl))}


@settings(deadline=None)
@given(
    st.integers(1, 512),
    st.booleans(),
    st.none() | st.floats(1, 8),
    st.floats(0, 1e5),
    st.booleans(),
)
def test_decode_lines_round_trip(
    running: int, graph: bool, length: float | None, speed: float, old: bool
) -> None:
    line = decode(running, graph, length, speed)
    line = line.replace("batch,", "batch.") if old else line
    (parsed,) = parse_server(line).decodes
    assert (parsed.running, parsed.graph) == (running, graph)
    assert parsed.accept_length == (None if length is None else float(f"{length:.2f}"))
    assert parsed.tokens_per_s == float(f"{speed:.2f}")


def test_a_graph_miss_names_batch_speed_and_reason() -> None:
    text = ARGS + CAPTURE + decode(2, True, 2.7, 171.4) + decode(5, False, 2.7, 34.2)
    sentence = found(text)["eager-steps"]
    assert "1 of 2" in sentence and "at 5 running" in sentence
    assert "34 against 171" in sentence
    assert "above the largest captured, 4" in sentence
    assert "eager-steps" not in found(ARGS + CAPTURE + decode(2, True, 2.7))


def test_a_cpu_has_no_graphs_to_miss() -> None:
    line = decode(1, False, 2.1).replace("cuda graph", "cpu graph")
    assert parse_server(line).decodes[0].graph is None
    assert "eager-steps" not in found(ARGS + line)


@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        ([2.4, 2.3], "acceptance"),
        ([1.0, 1.0], "acceptance"),  # too few lines for an alarm
        ([1.0] * 3, "accept-zero"),
        ([2.4, 1.0, 1.0, 1.0], "draft-dead"),
        ([1.0, 1.0, 1.0, 1.4], "acceptance"),
    ],
)
def test_acceptance_alarms(lengths: list[float], code: str) -> None:
    codes = found("".join(decode(1, True, length) for length in lengths))
    assert {"acceptance", "accept-zero", "draft-dead"} & set(codes) == {code}


@pytest.mark.parametrize(
    ("length", "rate", "code"),
    [
        (3.4, 0.80, "accept-rate-definition"),
        (3.4, 0.85, "accept-rate-definition"),
        (3.4, 1.13, "accept-rate-bug"),
        (3.4, 0.30, "accept-rate-odd"),
        (2.71, 0.57, "accept-rate-definition"),
    ],
)
def test_definitions_of_the_accept_rate(length: float, rate: float, code: str) -> None:
    line = decode(1, True, length).replace(
        f"accept rate: {(length - 1) / 3:.2f}", f"accept rate: {rate:.2f}"
    )
    sentence = found(ARGS + line)[code]
    words = {0.80: "drafts only", 0.85: "bonus token included", 0.57: "drafts only"}
    assert words.get(rate, "") in sentence


def test_a_rate_is_not_judged_without_the_number_of_drafts() -> None:
    assert not any(code.startswith("accept-rate") for code in found(decode(1, True, 3.4)))


def test_vllm_windows_count_as_acceptance() -> None:
    line = (
        "(APIServer pid=1) INFO 08-04 20:51:08 [metrics.py:120] SpecDecoding metrics: Mean"
        " acceptance length: {}, Accepted throughput: 0.12 tokens/s, Drafted throughput: 0.34"
        " tokens/s, Accepted: 92 tokens, Drafted: 259 tokens, Per-position acceptance rate: 0.757,"
        " 0.622, 0.432, Avg Draft acceptance rate: 35.5%\n"
    )
    log = parse_server(line.format(3.49))
    assert log.engine == "vllm" and log.speculative
    (window,) = log.windows
    assert (window.length, window.accepted, window.drafted) == (3.49, 92, 259)
    assert window.positions == (0.757, 0.622, 0.432)
    assert "3.49" in found(line.format(3.49))["acceptance"]
    assert "accept-zero" in found(line.format("1.00") * 3)


def test_piecewise_matters_only_to_a_server_that_drafts() -> None:
    mode = "INFO 04-23 09:12:31 [gpu_model_runner.py:1] setting cudagraph_mode=PIECEWISE\n"
    spec = "INFO 04-23 09:12:00 [c.py:1] speculative_config=SpeculativeConfig(method='eagle3')\n"
    none = "INFO 04-23 09:12:00 [c.py:1] vLLM speculative_config=None\n"
    assert "verify-not-captured" in found(spec + mode)
    assert "verify-not-captured" not in found(none + mode)
    full = "INFO 04-23 09:12:31 [c.py:1] cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE\n"
    assert "verify-not-captured" not in found(spec + full)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gates_of_all_ranks_are_one_finding(ranks: int) -> None:
    text = "".join(
        f"[2026-06-28 10:00:00 TP{rank}] {name} is disabled because it's not supported on more than"
        " two PCIe-only GPUs. To silence this warning, specify disable_custom_all_reduce=True.\n"
        for name in ("CustomAllReduceV2", "CustomAllreduce")
        for rank in range(ranks)
    )
    log = parse_server(text)
    assert [gate.count for gate in log.gates] == [ranks, ranks]
    assert f"{2 * ranks} log lines" in found(text)["custom-allreduce-gate"]


def test_the_same_drafter_quantisation_is_fine_when_it_differs() -> None:
    text = (FOLDER / "R100.txt").read_text()
    assert "draft-quant" in found(text)
    assert "draft-quant" not in found(text.replace("MTP, quant=gptq, bits=4", "MTP"))
    assert "draft-quant" not in found(text.replace("MTP, quant=gptq", "MTP, quant=fp8"))


def test_draft_extend_without_a_graph() -> None:
    assert "draft-extend-eager" in found(ARGS + CAPTURE + decode(1, True, 2.0))
    extend = CAPTURE.replace("target verify", "draft extend")
    assert "draft-extend-eager" not in found(ARGS + CAPTURE + extend + decode(1, True, 2.0))
    assert "draft-extend-eager" not in found(ARGS + CAPTURE)  # the log stops before serving


@pytest.mark.parametrize("first", range(4))
def test_the_first_error_of_any_rank_is_named(first: int) -> None:
    lines = [
        f"[2026-06-12 10:00:03 TP{r}] Watchdog caught collective operation timeout: x\n"
        for r in range(4)
    ]
    lines.insert(
        first, f"[2026-06-12 10:00:00 TP{first}] CUDA error: device-side assert triggered\n"
    )
    assert f"rank {first} failed first" in found("".join(lines))["first-error"]
    assert "first-error" not in found("".join(lines[:first] + lines[first + 1 :]))


def test_phases_of_a_crash() -> None:
    crash = "[2026-09-01 12:03:00 TP0] an illegal memory access was encountered\n"
    begin = CAPTURE.split("\n")[0] + "\n"
    assert "while graphs were captured" in found(begin + crash)["illegal-access"]
    assert "first replay" in found(CAPTURE + crash)["illegal-access"]
    served = found(CAPTURE + decode(1, True) + crash)["illegal-access"]
    assert "captured" not in served.split(":")[0]


def test_every_kind_of_error_can_pass_the_quick_filter() -> None:
    """A pattern without one of the filter's words would never be tried."""
    examples = {
        "kernel-arch": "Unsupported architecture",
        "multicast": "multicast is not supported",
        "peer-unsupported": "peer access is not supported between these two devices",
        "ipc-export": "custom_all_reduce.cuh:400 invalid argument",
        "mtp-missing": "layer 78 weights missing",
        "draft-shape": "size mismatch for d2t",
        "nan-logits": "NaN in the logits",
        "device-assert": "device-side assert triggered",
        "illegal-access": "an illegal memory access was encountered",
        "out-of-memory": "CUDA out of memory",
        "nccl-timeout": "Watchdog caught collective operation timeout",
        "stalled": "Scheduler watchdog timeout",
    }
    assert set(examples) == set(MEANINGS)
    for kind, line in examples.items():
        assert any(hint in line.lower() for hint in _HINTS)
        assert trouble_in(line) == kind


# NCCL


def search(pattern: int, channels: int, speed: float, kind: str) -> str:
    return (
        f"host:1:1 [0] NCCL INFO Pattern {pattern}, crossNic 0, nChannels {channels}, bw"
        f" {speed:.6f}/{speed:.6f}, type {kind}/PIX, sameChannels 1\n"
    )


@pytest.mark.parametrize(
    ("pattern", "channels", "speed", "kind", "code"),
    [
        (4, 2, 15.0, "SYS", "nccl-ring-poor"),
        (1, 1, 0.1, "SYS", "nccl-ring-poor"),
        (4, 4, 38.0, "PHB", "nccl-ring"),
        (4, 2, 48.0, "SYS", "nccl-ring"),
        (4, 2, 15.0, "PHB", "nccl-ring"),
    ],
)
def test_rings(pattern: int, channels: int, speed: float, kind: str, code: str) -> None:
    codes = set(found(search(pattern, channels, speed, kind)))
    assert codes & {"nccl-ring", "nccl-ring-poor"} == {code}


MATRIX = """host:1:1 [0] NCCL INFO Enabled NCCL Func/Proto/Algo Matrix:
     Function |       LL     LL128    Simple   |          Tree           Ring
    AllReduce |        1         {}         1   |             1              1
"""


@pytest.mark.parametrize(
    ("cell", "kind", "forced"), [(1, "SYS", True), (2, "SYS", False), (1, "NVL", False)]
)
def test_forced_ll128_in_the_matrix(cell: int, kind: str, forced: bool) -> None:
    codes = found(MATRIX.format(cell) + search(4, 8, 40.0, kind))
    assert ("proto-ll128-forced" in codes) == forced


def collectives(counts: dict[int, int], ranks: int = 8) -> str:
    init = "".join(
        f"host:{100 + r}:{100 + r} [{r}] NCCL INFO comm 0x{r} rank {r} nranks {ranks} cudaDev {r}"
        " busId 1000 commId 0x1 - Init COMPLETE\n"
        for r in counts
    )
    return init + "".join(
        f"host:{100 + r}:{900 + r} [{r}] NCCL INFO AllReduce: opCount {n:x} sendbuff 0x1 recvbuff"
        f" 0x1 acc (nil) count 28672 datatype 9 op 0 root 0 comm 0x{r} [nranks={ranks}] stream 1\n"
        for r, last in counts.items()
        for n in range(last + 1)
    )


@given(st.integers(2, 8), st.data())
@settings(deadline=None, max_examples=30)
def test_the_rank_that_lags_is_named(ranks: int, data: st.DataObject) -> None:
    lagging = data.draw(st.integers(0, ranks - 1))
    counts = {rank: 5 - (rank == lagging) for rank in range(ranks)}
    sentence = found(collectives(counts, ranks)).get("ranks-diverge", "")
    assert sentence.startswith(f"rank {lagging} last entered AllReduce number 4 ")
    together = found(collectives(dict.fromkeys(range(ranks), 5), ranks))
    assert "ranks-diverge" not in together and "ranks-together" in together


def test_a_smaller_group_is_not_compared_with_the_whole() -> None:
    text = collectives(dict.fromkeys(range(8), 5)) + (
        "host:103:903 [3] NCCL INFO AllReduce: opCount 1 sendbuff 0x1 recvbuff 0x1 acc (nil)"
        " count 1 datatype 9 op 0 root 0 comm 0x9 [nranks=4] stream 0x1\n"
    )
    assert "ranks-diverge" not in found(text)


def test_where_a_log_ends() -> None:
    banner = "host:1:1 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"
    init = (
        "host:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 commId 1 - Init"
        " COMPLETE\n"
    )
    assert "hang-in-init" in found(banner)
    assert "hang-after-init" in found(banner + init)
    assert "hang-after-init" not in found(banner + init + "loading weights\n" * 3)
    assert "hang-after-init" not in found(collectives({0: 0, 1: 0}))


def test_variables_as_nccl_understood_them() -> None:
    text = "host:1:1 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to 4\n"
    assert parse_nccl(text).environment == {"NCCL_P2P_LEVEL": "4"}
    assert "means SYS" in found(text)["p2p-level-number"]
    assert parse_nccl("nothing here") is None


# the command


def test_the_command_explains_and_returns_the_severity(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert logs_main([str(FOLDER / "R12.txt")]) == 2
    out = capsys.readouterr().out
    assert "verify is not captured" in out and "\x1b" not in out
    assert logs_main([str(FOLDER / "R55.txt"), "--json"]) == 0
    assert '"custom-allreduce-gate"' in capsys.readouterr().out
    check_refused(logs_main, [str(tmp_path / "absent.log")], says=("cannot be read",))
    check_refused(logs_main, [], says=("required",))
