"""Rules of the repository that a reader relies on."""

from __future__ import annotations

import ast
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted(
    path for folder in ("fastverify", "kernels", "bench") for path in (ROOT / folder).rglob("*.py")
)


def imported(path: pathlib.Path) -> set[str]:
    """Names of all modules a file imports, at any depth; ours in full, others' first part."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return {n if n.startswith("fastverify.kernels") else n.split(".")[0] for n in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_stay_where_they_belong(path: pathlib.Path) -> None:
    place = path.relative_to(ROOT).parts
    names = imported(path)
    if place[0] == "fastverify" and place[1] != "hooks":
        assert "sglang" not in names
    if place[0] == "fastverify":
        assert "triton" not in names
    if place[0] == "kernels":
        assert not names & {"sglang", "fastverify", "flashinfer"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: pathlib.Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    limit = 100 if path.parts[-3:-1] == ("kernels", "triton") else 40
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert node.end_lineno is not None
            assert node.end_lineno - first.lineno < limit, f"{node.name} is too long"


def dotted(init: pathlib.Path) -> str:
    """Package name of an __init__.py below the root."""
    return ".".join(init.parent.relative_to(ROOT).parts)


def test_every_package_is_listed_for_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {dotted(path) for path in (ROOT / "fastverify").rglob("__init__.py")}
    found |= {f"fastverify.{dotted(path)}" for path in (ROOT / "kernels").rglob("__init__.py")}
    assert listed == found


def test_pins_are_names_and_versions_only() -> None:
    for line in (ROOT / "pins.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*(\[[a-z,]+\])?==[\w.+!-]+( ; .+)?", line, re.I), (
            line
        )


def test_pins_hold_the_pinned_stack() -> None:
    pins = (ROOT / "pins.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for pinned in (d for d in project["dependencies"] if "==" in d):
        assert any(line.split(" ;")[0] == pinned for line in pins), pinned


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
