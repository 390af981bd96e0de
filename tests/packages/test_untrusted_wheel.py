"""``fastloop plan --untrusted`` with a real wheel in a real venv: nothing of the wheel is imported."""

from __future__ import annotations

import json
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
RECIPE = "data: {module: 'loud_pack:data'}\nplugins: [loud%s]\n"


def test_wheel_is_listed_and_not_imported(clean_venv, tmp_path):
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "loud_pack.py").write_text(CODE)
    (tmp_path / "loud" / "pyproject.toml").write_text(PROJECT)
    clean_venv.install(*build_wheels(tmp_path, tmp_path / "loud"))
    Path("r.yaml").write_text(RECIPE % "")
    command = ("-P", "-m", "fastloop", "plan")
    done = clean_venv.run(*command, "r.yaml", "--untrusted", "--json", "list.json", cwd=Path())
    assert (done.returncode, done.stderr) == (0, "")
    code = {item["key"]: item for item in json.loads(Path("list.json").read_text())["code"]}
    for key in ("plugins.loud", "data.module"):
        assert (code[key]["package"], code[key]["version"]) == ("loud-pack", "0.7")
        assert Path(code[key]["file"]).is_relative_to(clean_venv.folder)
    Path("local.py").write_text(CODE.replace("loud", "local"))
    Path("r.yaml").write_text(RECIPE % ", ./local.py")
    done = clean_venv.run(*command, "r.yaml", "--untrusted", cwd=Path())
    assert done.returncode == 2
    assert "local.py: a local file, and not of an installed package." in done.stderr
    Path("r.yaml").write_text(RECIPE % "")
    done = clean_venv.run("-m", "fastloop", "plan", "r.yaml", "--untrusted", cwd=Path())
    assert done.returncode == 2
    assert "import path: " in done.stderr
    assert not Path("imported.txt").exists()
    clean_venv.run(*command, "r.yaml", cwd=Path())
    assert Path("imported.txt").exists(), "control: planning without the option imports it"
