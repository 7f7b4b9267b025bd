"""The MLA verify plan: total, bounded, and its split schedule covers every request mix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tune_mla_verify import merged, to_toml
from fastverify.attention.plan import (
    MAX_ROWS,
    ArchTable,
    KvDtype,
    MlaVerifyPlan,
    arch_name,
    check_lengths,
    check_pages,
    choose,
    load_table,
    plan,
    split_lengths,
)
from fastverify.errors import ConfigError

ARCHES = sorted(load_table())
SHAPES = {
    "arch": st.sampled_from(ARCHES),
    "sms": st.integers(1, 200),
    "heads": st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    "rows": st.integers(1, MAX_ROWS),
    "batch": st.integers(1, 160),
    "max_context": st.integers(MAX_ROWS, 262144),
    "kv": st.sampled_from(["bf16", "fp8"]),
}  # fmt: skip


def made(**values: object) -> MlaVerifyPlan:
    found = plan(**values)  # type: ignore[arg-type]
    assert found is not None
    return found


@given(**SHAPES)
def test_plan_is_total_and_bounded(**values: object) -> None:
    found = made(**values)
    config = found.config
    assert config.kv == found.kv
    assert found.row_tiles * config.block_m >= found.heads * found.rows
    assert (found.row_tiles - 1) * config.block_m < found.heads * found.rows
    assert found.programs >= (1 if found.batch == 1 else 2 * found.batch)
    wave = max(1, values["sms"] * config.programs_per_sm // found.row_tiles)  # type: ignore[operator]
    assert found.programs < wave + 2 * found.batch + 1
    lines = found.rows * found.heads
    assert found.workspace_bytes == found.programs * lines * (2 * found.latent + 4)
    assert found.latent % found.merge[1] == 0
    assert found == made(**values)


@given(data=st.data(), **SHAPES)
def test_schedule_covers_every_mix(data: st.DataObject, **values: object) -> None:
    found = made(**values)
    length = st.integers(0, found.max_context) | st.sampled_from([0, 1, found.max_context])
    totals = data.draw(st.lists(length, min_size=found.batch, max_size=found.batch))
    tokens, splits = split_lengths(found, totals)
    assert sum(splits) <= found.programs
    assert tokens % found.config.block_n == 0
    assert tokens >= found.config.min_split_tokens
    for total, count in zip(totals, splits, strict=True):
        assert count * tokens >= total
        assert count == 0 if total == 0 else (count - 1) * tokens < total


def test_long_context_fills_the_gpu() -> None:
    found = made(arch="sm90", sms=132, heads=8, rows=4, batch=1, max_context=131072 + 8)
    _, splits = split_lengths(found, [131072 + 4])
    assert splits[0] >= 0.9 * found.programs


@pytest.mark.parametrize("name", ["sms", "heads", "rows", "batch", "page_size"])
def test_refuses_impossible_sizes(name: str) -> None:
    values = {"sms": 132, "heads": 8, "rows": 4, "batch": 1, "page_size": 1} | {name: 0}
    with pytest.raises(ConfigError, match=f"{name} >= 1, got 0"):
        plan(arch="sm90", max_context=1024, **values)


def test_refuses_context_below_rows() -> None:
    with pytest.raises(ConfigError, match="max_context 3, less than its 4 rows"):
        plan(arch="sm90", sms=132, heads=8, rows=4, batch=1, max_context=3)


@pytest.mark.parametrize(
    "change", [{"arch": "sm80"}, {"rows": MAX_ROWS + 1}, {"batch": 2**12, "max_context": 2**20}]
)
def test_declines(change: dict[str, object]) -> None:
    base = {"arch": "sm90", "sms": 132, "heads": 8, "rows": 4, "batch": 1, "max_context": 4096}
    assert plan(**(base | change)) is None  # type: ignore[arg-type]


def test_lengths_past_the_plan_are_refused() -> None:
    found = made(arch="sm90", sms=132, heads=8, rows=4, batch=2, max_context=4096)
    check_lengths(found, [0, 4096])
    with pytest.raises(ConfigError, match="request 1 has 4097 keys, outside 0..4096"):
        check_lengths(found, [5, 4097])
    with pytest.raises(ConfigError, match="has -1 keys"):
        check_lengths(found, [-1])
    with pytest.raises(ConfigError, match="3 requests but was planned for 2"):
        check_lengths(found, [1, 1, 1])


def test_pages_outside_the_pool_are_refused() -> None:
    found = made(arch="sm90", sms=132, heads=8, rows=4, batch=2, max_context=4096, page_size=16)
    check_pages(found, [0, 3], slots=64)
    for page in (-1, 4):
        with pytest.raises(ConfigError, match=f"page {page}, outside 0..3"):
            check_pages(found, [page], slots=64)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("arch", ARCHES)
def test_table_covers_small_and_large_tiles(arch: str, kv: KvDtype) -> None:
    section = load_table()[arch]
    tiles = {c.tile_rows for c in section.config if c.kv == kv}
    assert {16, 32, 64} <= tiles
    for rows in (1, 16, 17, 64, 1024):
        config = choose(section, rows, kv)
        assert config is not None
        assert config.tile_rows >= min(rows, max(tiles))


def test_measured_sections_say_where() -> None:
    for section in load_table().values():
        if section.measured:
            assert all((section.gpu, section.date, section.commit))


def test_arch_names() -> None:
    assert [arch_name(c) for c in ((9, 0), (12, 0), (12, 1), (10, 0))] == [
        "sm90", "sm120", "sm120", "sm100",
    ]  # fmt: skip


def test_tuner_writes_what_the_plan_reads() -> None:
    import msgspec

    table = load_table()
    text = to_toml(table)
    assert msgspec.toml.decode(text, type=dict[str, ArchTable]) == table
    section = table["sm90"]
    faster = msgspec.structs.replace(section.config[0], min_split_tokens=4096)
    after = merged(section, [faster], "some GPU")
    assert after.measured
    assert len(after.config) == len(section.config)
    assert choose(after, faster.tile_rows, faster.kv) == faster
