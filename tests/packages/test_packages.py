"""The packages under packages/: they use only public names of fastloop, and their wheels pass their own tests.

Modules:
    plugins/fastloop_tools/toolkit.py
"""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from package_helpers import ROOT, SUITES, CleanVenv, build_wheels

PROJECTS = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
TESTPATHS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"][
    "testpaths"
]
"""Folders whose tests `make test` and `make test-slow` run in the checkout."""
PUBLIC = (
    "fastloop",
    "fastloop.testing",
    "fastloop_plugins.text",
    "fastloop_plugins.rows",
    "fastloop_plugins.toolkit",
    "fastloop_tools.toolkit",
)
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
    lines = ["import fastloop_plugins.text.data", "from fastloop_plugins.text.forward_passes import call_with_mask"]
    code = "\n".join([*lines, "from fastloop import Run"])
    assert [*private_imports(code)] == [
        "fastloop_plugins.text.data:",
        "fastloop_plugins.text.forward_passes:call_with_mask",
    ]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_package_imports_only_public_names(project):
    files = [*project.glob("src/**/*.py")]
    assert {file.name: found for file in files if (found := [*private_imports(file.read_text())])} == {}
    others = {path.name.replace("-", "_") for path in PROJECTS if path != project}
    assert not [file.name for file in files if others & {*re.split(r"\W+", file.read_text())}]
    lines = {file.name: len(file.read_text().splitlines()) for file in files}
    assert lines
    assert {name: count for name, count in lines.items() if count > 500} == {}


def is_tested_in_checkout(project: Path) -> bool:
    return f"packages/{project.name}/tests" in TESTPATHS


def assert_wheel_is_source(wheel: Path, project: Path) -> None:
    """A wheel has the modules of a project to the byte, no others, and its entry points."""
    expected = {}
    for path in (project / "src").rglob("*"):
        if path.is_file():
            expected[path.relative_to(project / "src").as_posix()] = path.read_bytes()
    entry_points = configparser.ConfigParser()
    entry_points.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                entry_points.read_string(archive.read(name).decode())
            elif ".dist-info/" not in name:
                files[name] = archive.read(name)
    assert files == expected
    declared = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert {group: dict(entry_points[group]) for group in entry_points.sections()} == declared


@pytest.mark.slow
def test_the_wheels_pass_the_packages_own_tests(own_venv: CleanVenv, tmp_path: Path):
    """In a venv without the checkout. A package whose tests run in the checkout passes them there: its wheel has the
    same modules."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    copies = [shutil.copytree(project, tmp_path / project.name, ignore=ignored) for project in PROJECTS]
    wheels = build_wheels(tmp_path / "wheels", *copies)
    own_venv.install(*wheels)
    tested = []
    for wheel, copy in zip(wheels, copies, strict=True):
        if is_tested_in_checkout(copy):
            assert_wheel_is_source(wheel, copy)
        else:
            tested.append(copy)
        shutil.rmtree(copy / "src")
    helpers = ROOT / "tests" / "helpers"  # those of the tests that `make test` runs in the checkout, too
    done = own_venv.run("-c", SUITES, *tested, cwd=tmp_path, PYTHONPATH=str(helpers))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(" passed") == len(tested)


@pytest.mark.slow
def test_a_recipe_that_lists_plugins_of_a_missing_package_says_what_to_install(clean_venv: CleanVenv, tmp_path: Path):
    """`auto` selects among the plugins that are there."""
    done = clean_venv.run("-m", "fastloop", "plan", "distilbert_imdb_cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'fastloop-train[cpu]'" in done.stderr
    done = clean_venv.run("-m", "fastloop", "plan", "distilbert_imdb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "packing" in done.stdout
    assert "fast-dropout" not in done.stdout
    assert "pip install 'fastloop-train[cpu]'" in done.stdout + done.stderr
