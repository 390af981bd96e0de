"""The public API equals the stored snapshot, and the test finds a change.

Modules:
    plugins/fastloop_plugins/toolkit.py
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from long_form import long_form_only

from fastloop import hookspec, hookspecs
from fastloop.recipe import Train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def api() -> ModuleType:
    """The script of `make api-snapshot`."""
    spec = importlib.util.spec_from_file_location("public_api", ROOT / "docs" / "_public_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_api_is_that_of_the_snapshot(api):
    changes = api.differences(api.read(api.FILE.read_text(encoding="utf-8")), api.current())
    assert not changes, "\n".join(["the public API differs from tests/core/public_api.txt:", *changes, api.ACCEPT])


def test_a_snapshot_is_read_as_it_was_written(api):
    text = api.FILE.read_text(encoding="utf-8")
    assert api.render(api.read(text)) == text
    assert text.splitlines() == sorted(text.splitlines(), key=lambda line: line.split(": ", 1)[0])


def test_snapshot_covers_what_is_promised(api):
    stored = api.read(api.FILE.read_text(encoding="utf-8"))
    for name in (
        *(
            "hook after_step",
            "fastloop.Run.log()",
            "fastloop.State.step",
            "fastloop.Batch.loss_weight",
            "fastloop.Output.loss",
        ),
        *(
            "fastloop.Settings.optimizer",
            "fastloop.Plugin.requires",
            "fastloop.Trainer.fit()",
            "fastloop.testing.tiny_run",
        ),
        *(
            "recipe train.lr",
            "recipe data.text of text-classification",
            "plugin amp.dtype",
            "command fastloop train --nproc N",
        ),
        *(
            "run folder checkpoints/step-N/manifest.json",
            "run folder metrics.jsonl",
            "summary.json steps",
            "metrics.jsonl loss",
        ),
    ):
        assert name in stored


@pytest.fixture
def patch():
    """A monkeypatch that also restores the order of the hooks: pages list them in firing order."""
    before = dict(vars(hookspecs))
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    vars(hookspecs).clear()
    vars(hookspecs).update(before)


def test_changed_hook_and_option_are_found(api, patch):
    stored = {**dict(api.hook_lines()), **dict(api.recipe_lines())}

    @hookspec
    def after_step(run: Any, loss: Any, seconds: float) -> None:
        """Another one."""

    patch.setattr(hookspecs, "after_step", after_step)
    patch.delattr(hookspecs, "train_step")
    patch.setattr(hookspecs, "after_warmth", after_step, raising=False)
    patch.setattr(Train.__dataclass_fields__["lr"], "default", 1.0)
    found = api.differences(stored, {**dict(api.hook_lines()), **dict(api.recipe_lines())})
    # plugins that implement the removed hook differ, too
    assert [line for line in found if not line.startswith("plugin ")] == [
        "hook after_step\n    old: (run: Run, loss: Tensor) -> None [every plugin]"
        "\n    new: (run: Any, loss: Any, seconds: float) -> None [every plugin]",
        "hook after_warmth\n    old: (none)\n    new: (run: Any, loss: Any, seconds: float) -> None [every plugin]",
        "hook train_step\n    old: (run: Run, batches: list[Batch]) -> Tensor | None [first result wins]"
        "\n    new: (none)",
        "recipe train.lr\n    old: float = 5e-05\n    new: float = 1.0",
    ]


TWICE = """
import runpy, sys
script, option = sys.argv[1:]
try:
    sys.argv = [script, option]
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    print("ended with", end.code)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""
"""Runs a script with an option, then without: one process imports torch once."""


@pytest.mark.slow
@long_form_only
def test_changed_method_fails_the_check_with_the_command_that_accepts_it(tmp_path):
    for folder in ("core", "plugins", "recipes", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "core").mkdir(parents=True)
    shutil.copy(ROOT / "tests/core/public_api.txt", tmp_path / "tests/core/public_api.txt")
    state = tmp_path / "core/fastloop/state.py"
    text = state.read_text(encoding="utf-8")
    assert "def request_stop(self, reason: str)" in text
    state.write_text(
        text.replace("def request_stop(self, reason: str)", "def request_stop(self, reason: str, code: int = 0)")
    )
    folders = [tmp_path / "core", tmp_path / "plugins"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, *filter(None, sys.path)]))}

    command = [sys.executable, "-c", TWICE, "docs/_public_api.py", "--check"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    out, checked, _ = done.stdout.partition("ended with 1\n")
    assert checked, done.stdout + done.stderr
    old, new = "(reason: str) -> None", "(reason: str, code: int=0) -> None"
    assert out.startswith(f"fastloop.State.request_stop()\n    old: {old}\n    new: {new}\nIf the change is intended")
    for word in ("make api-snapshot", "CHANGELOG.md", "docs/stability.md"):
        assert word in out
    assert done.returncode == 0, done.stderr
    assert f"fastloop.State.request_stop(): {new}" in (tmp_path / "tests/core/public_api.txt").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("toolkit", ["fastloop_plugins.text", "fastloop_plugins.toolkit"])
def test_names_of_a_toolkit_are_imported_from_the_module_that_defines_them(toolkit):
    module = importlib.import_module(toolkit)
    defined = {name: getattr(getattr(module, name), "__module__", place) for name, place in module.PLACES.items()}
    assert defined == module.PLACES
