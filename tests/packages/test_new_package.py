"""A package of ``fastloop new plugin`` is green as it is written: built, installed, tested, linted and trained with."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest
from package_helpers import build_wheel

pytestmark = pytest.mark.slow


def test_new_package_passes_its_tests(clean_venv, tmp_path):
    done = clean_venv.run("-m", "fastloop", "new", "plugin", "night-watch", "--author", "Ada Lovelace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    project = tmp_path / "night-watch"
    for command in (["check"], ["format", "--check", "--diff"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout

    wheel = build_wheel(project, tmp_path)
    with zipfile.ZipFile(wheel) as files:
        assert {name for name in files.namelist() if "dist-info" not in name} == {"night_watch/__init__.py"}
        assert "night_watch-0.1.0.dist-info/licenses/LICENSE" in files.namelist()
    clean_venv.install(wheel)

    done = clean_venv.run("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", cwd=project)
    assert done.returncode == 0, done.stdout
    done = clean_venv.run("-m", "fastloop", "train", "recipe.yaml", "train.device=cpu", cwd=project)
    assert done.returncode == 0, done.stderr
    summary = json.loads((project / "runs/night-watch/summary.json").read_text())
    assert summary["steps"] == 40
    assert summary["night-watch"]["step"] in range(5, 41, 5)
