"""The packages under packages/: they use only public names of fastloop, and their wheels pass their own tests."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from package_helpers import ROOT, CleanVenv, build_wheels

PROJECTS = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
PUBLIC = ("fastloop", "fastloop.testing", "fastloop_plugins.text", "fastloop_plugins.rows")
"""Modules whose ``__all__`` is public."""
NAMES = {module: {*import_module(module).__all__} for module in PUBLIC}
NAMES["fastloop.runtime.random_states"] = {"random_states", "restore_random_states"}  # docs/loop.md names them
NAMES["fastloop.evaluation_results"] = {"evaluating"}


def private_imports(code: str) -> Iterator[str]:
    """The imports of fastloop's private modules and names, as ``module:name``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found = [(each.name, "") for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", each.name) for each in node.names]
        else:
            continue
        for module, name in found:
            is_ours = module.partition(".")[0] in ("fastloop", "fastloop_plugins", "fastloop_tools")
            if is_ours and name not in NAMES.get(module, ()):
                yield f"{module}:{name}"


def test_private_imports_are_found():
    code = (
        "import fastloop_plugins.text.data\nfrom fastloop_plugins.text.masks import forward\nfrom fastloop import Run"
    )
    assert [*private_imports(code)] == ["fastloop_plugins.text.data:", "fastloop_plugins.text.masks:forward"]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_package_imports_only_public_names(project):
    files = [*project.glob("src/**/*.py")]
    assert {file.name: found for file in files if (found := [*private_imports(file.read_text())])} == {}
    lines = {file.name: len(file.read_text().splitlines()) for file in files}
    assert {name: count for name, count in lines.items() if count > 150} == {}
    assert 0 < sum(lines.values()) <= 1_000


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_the_wheel_passes_the_packages_own_tests(project: Path, clean_venv: CleanVenv, tmp_path: Path):
    """In a venv without the checkout, and without a second conformance class: it takes a minute."""
    copy = shutil.copytree(project, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    clean_venv.install(*build_wheels(tmp_path / "wheels", copy))
    shutil.rmtree(copy / "src")
    arguments = ("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", "not ConformanceOf", "tests")
    done = clean_venv.run(*arguments, cwd=copy)
    assert done.returncode == 0, done.stdout
