"""The probe of `fastverify doctor --probe` on real GPUs."""

from __future__ import annotations

import pytest

from fastverify.doctor.probing import measure, run_probe
from fastverify.machine import read_machine

pytestmark = pytest.mark.gpu


def _two() -> int:
    import torch

    count = int(torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    return count


def test_every_pair_is_timed() -> None:
    count = _two()
    tables = measure(range(count))
    assert tables is not None
    for table in tables:
        assert [len(row) for row in table] == [count] * count
        assert all((table[i][j] > 0) == (i != j) for i in range(count) for j in range(count))
    assert all(0.1 < table < 2000 for row in tables[0] for table in row if table)


def test_the_probe_answers_in_bounded_time() -> None:
    _two()
    probed = run_probe(read_machine())
    assert probed.measured.probe or probed.notes
