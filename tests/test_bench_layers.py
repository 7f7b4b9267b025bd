"""What measured parts add up to, and how they move to another memory bandwidth."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from bench import layer_attention, layer_measure, shapes
from bench.layer_parts import LAYER_PARTS, MOE_BLOCK, MOE_PARTS
from bench.layer_scale import measured_compute, part_bytes, stretch_us
from bench.layer_table import (
    Cell,
    Depth,
    Timing,
    layer_us,
    parts_sum_us,
    scaled_step_us,
    summary,
    unattributed_share,
)

DEPTH = Depth(layers=10, dense=1)


def cell(rows: int = 1, *, step_us: float | None = None) -> Cell:
    times = dict.fromkeys(LAYER_PARTS, 10.0) | dict.fromkeys(MOE_PARTS, 5.0)
    times |= {MOE_BLOCK: 16.0, "dense_mlp": 30.0, "embedding": 2.0, "head": 50.0}
    out = Cell("triton", 512, rows, 1, {name: Timing(us) for name, us in times.items()})
    out.step = None if step_us is None else Timing(step_us)
    return out


# 10 layers of 5 parts of 10 us, 9 MoE blocks of 16, and 82 of dense, embedding and head.
SUM_US = 10 * 50 + 9 * 16 + 82


def test_sum_counts_each_part_as_often_as_the_step_does() -> None:
    times = {name: timing.us for name, timing in cell().parts.items()}
    assert parts_sum_us(times, DEPTH) == SUM_US
    assert parts_sum_us(times, Depth(20, 1)) == SUM_US + 10 * (50 + 16)
    del times["attention"]
    assert parts_sum_us(times, DEPTH) is None


def test_rows_make_the_parts_add_up_to_the_step() -> None:
    one = cell(step_us=SUM_US + 40.0)
    rows = layer_us(one, DEPTH)
    assert rows["moe_overlap"] == -4.0
    assert rows["unattributed"] == 4.0
    assert MOE_BLOCK not in rows
    per_layer = sum(rows[name] for name in (*LAYER_PARTS, "unattributed"))
    moe = sum(rows[name] for name in (*MOE_PARTS, "moe_overlap"))
    assert 10 * per_layer + 9 * moe + 82 == one.step.us  # type: ignore[union-attr]
    assert unattributed_share(one, DEPTH) == pytest.approx(40 / (SUM_US + 40))


def test_fewer_layers_scale_to_the_whole_model() -> None:
    one = cell(step_us=SUM_US + 40.0)
    assert scaled_step_us(one, DEPTH, DEPTH) == pytest.approx(SUM_US + 40)
    assert scaled_step_us(one, DEPTH, Depth(20, 1)) == pytest.approx(SUM_US + 660 + 80)
    assert scaled_step_us(cell(), DEPTH, DEPTH) is None


def test_summary_keys_and_the_ratio() -> None:
    numbers = summary([cell(1, step_us=1000.0), cell(3, step_us=1500.0)], DEPTH, Depth(20, 1))
    assert numbers["layer_us.ctx512.rows3.attention"] == 10.0
    assert numbers["step_ms.ctx512.rows1"] == 1.0
    assert numbers["verify3_over_decode1.ctx512"] == 1.5
    assert "scaled_step_ms.ctx512.rows1" in numbers
    same = summary([cell(3, step_us=1500.0)], DEPTH, DEPTH)
    assert "verify3_over_decode1.ctx512" not in same
    assert not any(key.startswith("scaled") for key in same)


def test_a_failed_step_keeps_its_parts() -> None:
    numbers = summary([cell()], DEPTH, DEPTH)
    assert numbers["layer_us.ctx512.rows1.experts"] == 5.0
    assert not any(key.startswith("step_ms") for key in numbers)


def test_only_the_memory_share_stretches() -> None:
    # 4.8 MB at 4.8 TB/s take 1 us of the 3; at half the bandwidth, 2 us more than nothing else.
    assert stretch_us(3.0, 4.8e6, 4.8, 2.4) == pytest.approx(4.0)
    assert stretch_us(3.0, 0.0, 4.8, 2.4) == 3.0
    # More bytes than the time allows: all of it is memory.
    assert stretch_us(3.0, 1e9, 4.8, 2.4) == pytest.approx(6.0)
    assert stretch_us(3.0, 4.8e6, 4.8, 4.8) == pytest.approx(3.0)


def test_bytes_of_a_kimi_rank() -> None:
    reads = part_bytes(shapes.shape("kimi-k2.5"), 8, context=4096, batch=2, experts=8)
    assert reads["attention"] == 2 * 2 * 4096 * 576
    assert reads["experts"] == 8 * 3 * 7168 * 256 * 0.5625
    assert reads["router"] == 2 * 7168 * 384
    assert reads["head"] == 2 * 7168 * 20480


def test_same_bandwidth_is_measured_and_gives_the_step_back() -> None:
    one = cell(step_us=SUM_US + 40.0)
    parts = layer_us(one, DEPTH)
    compute = measured_compute(parts, {}, layers=10, dense=1, source_tb_s=4.8, tb_s=4.8)
    assert compute.kind == "measured"
    assert compute.ms == pytest.approx((SUM_US + 40) / 1000)
    assert compute.norms_ms == pytest.approx(10 * 20 / 1000)
    slower = measured_compute(
        parts, {"experts": 4.8e6}, layers=10, dense=1, source_tb_s=4.8, tb_s=2.4
    )
    assert slower.kind == "scaled"
    assert slower.ms - compute.ms == pytest.approx(9 * 1.0 / 1000)


class FakeKernel:
    """Stands for our attention hooks: serves verify, hands decode back."""

    def __init__(self, *, decode: bool) -> None:
        self.declined: dict[str, int] = {}
        self.reserved: tuple[int, int] | None = None

    def after_graph_state(self, result: Any, backend: Any, max_bs: int, rows: int) -> None:
        self.reserved = (max_bs, rows)

    def around_extend(self, original: Any, backend: Any, q: str) -> str:
        return f"ours {q}"

    def around_decode(self, original: Any, backend: Any, q: str) -> str:
        self.declined["decode: no kernel"] = self.declined.get("decode: no kernel", 0) + 1
        return str(original(backend, q))


class FakeTriton:
    """Stands for SGLang's Triton backend."""

    graphs: tuple[int, int] | None = None

    def init_cuda_graph_state(self, max_bs: int, rows: int) -> None:
        self.graphs = (max_bs, rows)

    def forward_extend(self, q: str) -> str:
        return f"triton {q}"

    def forward_decode(self, q: str) -> str:
        return f"triton {q}"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("fastverify.hooks.attention")
    module.VerifyAttention = FakeKernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastverify.hooks.attention", module)
    backend = FakeTriton()
    layer_attention.add_our_kernel(backend)
    return backend


def test_our_kernel_sits_on_one_backend_and_leaves_the_other_alone(hooked: Any) -> None:
    plain = FakeTriton()
    hooked.init_cuda_graph_state(1, 8)
    assert hooked.graphs == hooked.fastverify_kernel.reserved == (1, 8)
    assert hooked.forward_extend("q") == "ours q"
    assert plain.forward_extend("q") == "triton q"
    assert layer_attention.declined_calls(plain) == {}


def test_a_declined_batch_is_not_credited_to_our_kernel(
    hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(rank: Any, one: Cell) -> None:
        one.step = Timing(1000.0)
        call = rank.backend.forward_decode if one.rows == 1 else rank.backend.forward_extend
        call("q")

    monkeypatch.setattr(layer_measure, "measure_all", serve)
    rank = types.SimpleNamespace(backend=hooked)
    for _ in range(2):
        decode = cell(1)
        layer_measure.measure_cell(rank, decode)  # type: ignore[arg-type]
        assert decode.step is None
        assert decode.parts == {}
        assert decode.failed == {"attention": "declined: decode: no kernel"}
    verify = cell(3)
    layer_measure.measure_cell(rank, verify)  # type: ignore[arg-type]
    assert verify.step == Timing(1000.0)
    assert verify.failed == {}
