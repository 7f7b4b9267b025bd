"""The wheel and the editable install both bring the package, the kernels and the entry points."""

from __future__ import annotations

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROBE = (
    "import fastverify, fastverify.kernels, fastverify.kernels.triton, fastverify.preset as p;"
    "print(fastverify.__file__, fastverify.kernels.__file__, len(p.preset_names()))"
)


def run(*command: str, cwd: pathlib.Path, env: dict[str, str] | None = None) -> str:
    """Run with a time limit; a failure shows what the command said."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy of the sources, so that no build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("fastverify", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), ".")
    run(sys.executable, *build, cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.packaging
def test_the_wheel_holds_what_is_needed_and_no_top_level_kernels(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read("fastverify-0.1.0.dist-info/entry_points.txt").decode()
    assert {"fastverify/kernels/__init__.py", "fastverify/presets/kimi-k2.5.toml"} <= names
    assert {"fastverify/kernels/tables/mla_verify.toml", "fastverify/doctor/cli.py"} <= names
    assert {"fastverify/py.typed", "fastverify-0.1.0.dist-info/licenses/LICENSE"} <= names
    assert not any(name.startswith(("kernels/", "tests/", "bench/")) for name in names)
    assert "fastverify = fastverify.plugin:register" in entry_points


@pytest.mark.packaging
def test_the_wheel_works_away_from_the_checkout(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    said = run(
        sys.executable, "-P", "-c", PROBE, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    package, kernels, presets = said.split()
    assert package.startswith(str(tmp_path)) and kernels.startswith(str(tmp_path))
    assert presets == "5"


@pytest.mark.packaging
def test_the_editable_install_points_into_the_checkout(tmp_path: pathlib.Path) -> None:
    package, kernels, _ = run(sys.executable, "-P", "-c", PROBE, cwd=tmp_path).split()
    assert pathlib.Path(package).parent == ROOT / "fastverify"
    assert pathlib.Path(kernels).parent == ROOT / "kernels"


@pytest.mark.packaging
def test_sglang_finds_both_entry_points() -> None:
    for group, name, value in (
        ("sglang.srt.plugins", "fastverify", "fastverify.plugin:register"),
        ("sglang.srt.platforms", "fastverify_cpu", "fastverify.cpu.platform:activate"),
    ):
        (entry,) = importlib.metadata.entry_points(group=group, name=name)
        assert entry.value == value and callable(entry.load())
