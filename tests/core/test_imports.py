"""Imports between modules: the command line starts fast, and the core knows no plugin."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pinned import with_pinned_versions

import fastloop
from fastloop.cli.startup import GC_THRESHOLD, reduced_gc
from fastloop.plugins.installed import installed

CORE = Path(fastloop.__file__).parent
HEAVY = ("torch", "mypy", "accelerate", "transformers", "datasets", "numpy", "fastloop_plugins")

PROBE = """
import sys
try:
    {code}
except SystemExit as done:
    assert not done.code, done.code
print("LOADED", *(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize(
    "code",
    [
        "import fastloop; fastloop.Plugin",
        *(
            f"sys.argv = ['fastloop', *{arguments!r}]; from fastloop.cli import main; main()"
            for arguments in (["--help"], ["plugins"], ["recipes"])
        ),
    ],
    ids=["import", "help", "plugins", "recipes"],
)
def test_fast_commands_import_neither_torch_nor_plugins(code):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(code=code, heavy=HEAVY)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.slow
def test_a_process_that_restarts_for_its_environment_has_not_imported_torch(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "data: {files: {train: none.csv}, text: text, label: label}\nmodel: {name: nowhere}\n"
    )
    code = (
        "from fastloop.cli.startup import environment; from fastloop.recipe import load_recipe; "
        "from fastloop.plugins.resolve import resolve; "
        "recipe = load_recipe('recipe.yaml', (), ('allocator', 'cpu-affinity'), ()); "
        "assert environment(resolve(recipe, any_machine=True)) is not None"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROBE.format(code=code, heavy=("torch", "accelerate", "transformers", "datasets"))]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.slow
@with_pinned_versions
def test_torchmetrics_is_imported_without_scipys_signal_which_works_afterwards():
    metrics = {"f1": {"type": "MulticlassF1Score", "num_classes": 3}}
    code = (
        "from fastloop.recipe import make_recipe; "
        "from fastloop_plugins.tasks.shared.metrics import find_metrics; "
        f"find_metrics({metrics}, make_recipe({{}}), 'plugins.module.metrics'); "
        "assert 'torchmetrics' in sys.modules; assert 'scipy.stats' not in sys.modules; "
        "import scipy.signal; scipy.signal.windows.hann(4); from torchmetrics.classification import MulticlassAccuracy"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROBE.format(code=code, heavy=())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def imports(path: Path) -> set[str]:
    """Modules that a file imports."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text(encoding="utf-8")))
    return found


FILES = sorted(CORE.rglob("*.py"))


def test_core_names_no_plugin():
    plugins = {name.rpartition(":")[2] for name in installed()}
    # words that mean something else too
    ordinary = {"compile", "log", "allocator", "profile", "progress", "module", "auto"}
    for path in FILES:
        imported = {name for name in imports(path) if name.partition(".")[0] == "fastloop_plugins"}
        # the list of default plugins has its place beside the plugins
        assert not [name for name in imported if not name.startswith("fastloop_plugins.default_plugins")], path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in plugins - ordinary, f"{path}:{node.lineno} names a plugin"
                if path.name != "packages.py":  # it names the packages of this distribution
                    assert "fastloop_plugins" not in node.value, f"{path}:{node.lineno}"


def test_the_kit_for_tests_is_opted_into():
    for path in FILES:
        if path.relative_to(CORE).parts[0] != "testing":
            assert not [
                name
                for name in imports(path)
                if name.partition(".")[0] == "pytest" or name.startswith("fastloop.testing")
            ], path


@pytest.mark.slow
def test_each_module_imports_alone():
    """No circle: every module can be the first to be imported."""
    modules = [
        ".".join(path.relative_to(CORE.parent).with_suffix("").parts)
        for path in FILES
        if path.stem not in ("__init__", "__main__")
    ]
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    for key in [key for key in sys.modules if key.partition(".")[0] == "fastloop"]:
        del sys.modules[key]
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_installed_package_that_torchmetrics_cannot_import_is_named(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torch; torch.library.register_fake('torchvision::nms')(print)"
    )
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n"
    )
    command = [sys.executable, "-m", "fastloop", "plan", "quickstart"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "300"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2
    found = "the package torchvision fails with RuntimeError: operator torchvision::nms does not exist. Install the"
    assert found in done.stderr
    assert "Traceback" not in done.stderr


def test_every_public_name_exists():
    for name in fastloop.__all__:
        assert getattr(fastloop, name).__doc__ or name in ("hookimpl", "MetricMode", "Trait"), name
    with pytest.raises(AttributeError, match="module 'fastloop' has no attribute 'Trainr'"):
        _ = fastloop.Trainr


def test_gc_threshold_during_imports_is_restored(monkeypatch):
    before, frozen = gc.get_threshold(), []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.get_threshold()[0]))
    with reduced_gc():
        assert gc.get_threshold()[0] == GC_THRESHOLD
    assert gc.get_threshold() == before
    assert frozen == [GC_THRESHOLD]
    try:
        with reduced_gc():
            gc.set_threshold(1234)
        assert gc.get_threshold()[0] == 1234
    finally:
        gc.set_threshold(*before)
