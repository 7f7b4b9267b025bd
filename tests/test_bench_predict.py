"""The PCIe model against the published arithmetic it restates, and the prediction's rules."""

from __future__ import annotations

import json
import pathlib

import pytest

from bench import pcie_model, predict
from bench.layer_scale import Compute
from fastverify.errors import ConfigError

ROW = 14336


@pytest.mark.parametrize(
    ("rows", "one_shot", "two_shot", "island"),
    [(1, 5.2, 3.2, 3.1), (3, 13.4, 5.2, 4.4), (4, 17.5, 6.2, 5.0), (8, 33.8, 10.3, 7.6)],
)
def test_bounds_on_two_switches(rows: int, one_shot: float, two_shot: float, island: float) -> None:
    size = rows * ROW
    assert pcie_model.one_shot_us(size) == pytest.approx(one_shot, abs=0.06)
    assert pcie_model.two_shot_us(size) == pytest.approx(two_shot, abs=0.06)
    assert pcie_model.island_us(size) == pytest.approx(island, abs=0.06)


@pytest.mark.parametrize(
    ("case", "name", "decode_tok_s", "verify_ms", "iteration_ms", "at_two", "even", "own"),
    [
        ("tuned", "nccl-tuned", 82, 14.0, 16.2, 124, 1.33, 1.33),
        ("tuned", "pcie-ipc", 96, 12.3, 14.5, 138, 1.19, 1.40),
        ("tuned", "fused-bound", 100, 11.7, 13.9, 144, 1.14, 1.40),
        ("untuned", "nccl-untuned", 82, 13.7, 15.9, 126, 1.31, 1.31),
        ("untuned", "pcie-ipc", 143, 8.9, 11.1, 180, 0.91, 1.59),
        ("untuned", "fused-bound", 152, 8.4, 10.6, 190, 0.86, 1.60),
    ],
)
def test_three_row_verify_of_the_model(
    case: str,
    name: str,
    decode_tok_s: float,
    verify_ms: float,
    iteration_ms: float,
    at_two: float,
    even: float,
    own: float,
) -> None:
    collective = pcie_model.collective(name)
    assert collective is not None
    lines = predict.predict(
        predict.modelled_compute(case), collective, hidden=7168, layers=61, accept=(2.0, 4.0)
    )
    line = next(one for one in lines if one.rows == 3)
    assert 1000 / line.decode_ms == pytest.approx(decode_tok_s, abs=0.6)
    assert line.verify_ms == pytest.approx(verify_ms, abs=0.1)
    assert line.iteration_ms == pytest.approx(iteration_ms, abs=0.1)
    assert line.tok_s[2.0] == pytest.approx(at_two, abs=1.0)
    assert line.break_even_baseline == pytest.approx(even, abs=0.01)
    assert line.break_even_own == pytest.approx(own, abs=0.015)
    # Three rows cannot give four tokens.
    assert line.tok_s[4.0] is None
    assert line.kind == "modelled/modelled/modelled"


def test_a_fused_collective_takes_over_the_norms_but_the_last() -> None:
    flat = pcie_model.Collective("flat", lambda _: 10.0, False, "")
    fused = pcie_model.Collective("fused", lambda _: 10.0, True, "")
    compute = Compute(ms=5.0, norms_ms=1.22, kind="measured")
    assert predict.step_ms(compute, flat, 1, 7168, 61) == pytest.approx(5.0 + 1.22)
    assert predict.step_ms(compute, fused, 1, 7168, 61) == pytest.approx(5.0 + 1.22 - 1.21)


def test_expected_experts() -> None:
    found = [round(pcie_model.expected_experts(n), 1) for n in (1, 2, 3, 4, 6, 8)]
    assert found == [8.0, 15.8, 23.5, 31.0, 45.6, 59.5]


def test_measured_collective_interpolates_between_its_sizes() -> None:
    one = predict.measured_collective("43008:9,14336:7,86016:15")
    assert one.kind == "measured"
    assert one.time_us(14336) == pytest.approx(7.0)
    assert one.time_us(28672) == pytest.approx(8.0)
    assert one.time_us(64512) == pytest.approx(12.0)
    assert one.time_us(129024) == pytest.approx(21.0)
    for bad in ("7", "14336:7", "a:b,c:d", "1:2:3,4:5:6"):
        with pytest.raises(ConfigError, match="two or more BYTES:US"):
            predict.measured_collective(bad)


def test_a_file_that_is_no_result(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match="is no result file"):
        predict.read_result(path)
    path.write_text(json.dumps({"bench": "serve"}))
    with pytest.raises(ConfigError, match="pass a verify_latency file"):
        predict.read_result(path)
    with pytest.raises(ConfigError, match="pass --source-tb-s"):
        predict.source_bandwidth({"machine": {"gpus": [{"name": "NVIDIA A2"}]}})
    named = {"machine": {"gpus": [{"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}]}}
    assert predict.source_bandwidth(named) == 1.79
