"""When the stand-in for `sgl_kernel` is put in place, and what a CPU run is started with."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from fastverify.cpu.environment import cpu_arguments, cpu_environment
from fastverify.errors import ConfigError

PROBE = """
    import sys
    from fastverify.cpu.platform import activate
    assert activate() is None
    module = sys.modules.get("sgl_kernel")
    print(module.__name__ if module else None, "torch" in sys.modules)
"""


def probe(*, code: str = PROBE, path: pathlib.Path | None = None, **variables: str) -> list[str]:
    """Words printed by a fresh process that activated the platform."""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


def fake_sgl_kernel(folder: pathlib.Path, source: str) -> pathlib.Path:
    (folder / "sgl_kernel").mkdir()
    (folder / "sgl_kernel" / "__init__.py").write_text(textwrap.dedent(source))
    return folder


def test_nothing_happens_on_a_gpu_run() -> None:
    assert probe() == ["None", "False"]


def test_a_failing_cuda_build_is_replaced(tmp_path: pathlib.Path) -> None:
    broken = fake_sgl_kernel(
        tmp_path,
        """
        from . import part
        raise ImportError("libcuda.so.1: cannot open shared object file")
        """,
    )
    (broken / "sgl_kernel" / "part.py").write_text("")
    code = PROBE + "    print([m for m in sys.modules if m.startswith('sgl_kernel.')])\n"
    words = probe(code=code, path=broken, SGLANG_USE_CPU_ENGINE="1")
    assert words == ["fastverify.cpu.sgl_kernel", "True", "[]"]


def test_a_working_cuda_build_is_replaced(tmp_path: pathlib.Path) -> None:
    """It has the Python names of the CPU functions, but not their operators."""
    cuda = fake_sgl_kernel(tmp_path, "def verify_tree_greedy_cpu(): ...")
    words = probe(path=cuda, SGLANG_USE_CPU_ENGINE="1")
    assert words == ["fastverify.cpu.sgl_kernel", "True"]


def test_a_cpu_build_is_left_alone(tmp_path: pathlib.Path) -> None:
    real = fake_sgl_kernel(
        tmp_path,
        """
        import torch
        torch.ops.sgl_kernel.verify_tree_greedy_cpu = print
        """,
    )
    assert probe(path=real, SGLANG_USE_CPU_ENGINE="1") == ["sgl_kernel", "True"]


def test_the_stand_in_does_not_depend_on_our_hooks(tmp_path: pathlib.Path) -> None:
    cuda = fake_sgl_kernel(tmp_path, "")
    words = probe(path=cuda, SGLANG_USE_CPU_ENGINE="1", FASTVERIFY_DISABLE="1")
    assert words[0] == "fastverify.cpu.sgl_kernel"


@pytest.mark.parametrize(
    ("tp", "cores", "binding"),
    [(2, 2, "0|1"), (2, 9, "0-3|4-7"), (4, 4, "0|1|2|3"), (4, 2, "0|1|0|1"), (2, 1, "0|0")],
)
def test_ranks_share_the_cores(tp: int, cores: int, binding: str) -> None:
    values = {name: value for name, value, _ in cpu_environment(tp, cores)}
    assert values["SGLANG_CPU_OMP_THREADS_BIND"] == binding
    assert values["SGLANG_NCCL_SO_PATH"] == "none"


def test_one_rank_needs_no_binding() -> None:
    names = {name for name, _, _ in cpu_environment(1, 8)}
    assert names == {"SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}


@pytest.mark.parametrize("tp", [1, 2])
def test_every_setting_has_a_reason_and_stands_once(tp: int) -> None:
    for settings in (cpu_environment(tp, 2), cpu_arguments(tp)):
        assert all(reason.strip() for _, _, reason in settings)
        names = [name for name, _, _ in settings]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(("tp", "cores"), [(0, 2), (1, 0)])
def test_impossible_counts_are_refused(tp: int, cores: int) -> None:
    with pytest.raises(ConfigError, match="is 0, but a CPU run needs at least 1"):
        cpu_environment(tp, cores)
