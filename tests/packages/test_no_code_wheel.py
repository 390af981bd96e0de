"""``--no-code`` with a real wheel in a real venv: its plugin is named, and no other code of the recipe runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_helpers import build_wheels

pytestmark = pytest.mark.slow

CODE = """
import pathlib
pathlib.Path("imported.txt").write_text(__name__)
from fastloop import Plugin
class Loud(Plugin):
    name = "loud"
def data(): ...
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "loud-pack"
version = "0.7"
dependencies = ["fastloop-train"]

[project.entry-points."fastloop.plugins"]
loud = "loud_pack:Loud"
"""
RECIPE = """
model: {config: {model_type: distilbert}, tokenizer: {kind: word}}
data: {files: {train: rows.csv}, text: text, label: label}
plugins: [loud%s]
"""


def test_plugin_of_a_wheel_is_named(own_venv, tmp_path):
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "loud_pack.py").write_text(CODE)
    (tmp_path / "loud" / "pyproject.toml").write_text(PROJECT)
    own_venv.install(*build_wheels(tmp_path, tmp_path / "loud"))
    Path("rows.csv").write_text("text,label\na,b\n")
    Path("local.py").write_text(CODE.replace("imported.txt", "local.txt").replace("loud", "local"))
    Path("r.yaml").write_text(RECIPE % ", ./local.py")
    command = ("-P", "-m", "fastloop", "plan")
    done = own_venv.run(*command, "r.yaml", "--no-code", cwd=Path())
    assert done.returncode == 2
    assert "r.yaml: plugins[1]: it runs the Python code of " in done.stderr
    assert not Path("local.txt").exists()
    Path("r.yaml").write_text(RECIPE % "")
    done = own_venv.run(*command, "r.yaml", "--no-code", cwd=Path())
    assert done.returncode == 0, done.stderr
    assert "--no-code: runs the installed plugin loud of the package loud-pack 0.7\n" in done.stdout
    Path("imported.txt").unlink()
    done = own_venv.run("-m", "fastloop", "plan", "r.yaml", "--no-code", cwd=Path())
    assert done.returncode == 2
    assert "--no-code: Python imports modules from " in done.stderr
    assert not Path("imported.txt").exists()
