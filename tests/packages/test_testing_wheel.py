"""The venv of these tests is correct: fastloop comes from the wheel, and torch from the packages beside it."""

from __future__ import annotations

import json
import zipfile

import pytest
from package_helpers import CleanVenv

pytestmark = pytest.mark.slow

LOOK = """
import json
from importlib.metadata import distribution, entry_points
import fastloop, fastloop_plugins, torch
from fastloop.recipe import shipped_recipes
points = [point for point in entry_points(group="fastloop.plugins") if point.dist.name == "fastloop-train"]
print(json.dumps({
    "fastloop": fastloop.__file__,
    "plugins": fastloop_plugins.__file__,
    "metadata": str(distribution("fastloop-train").locate_file("fastloop")),
    "points": sorted({str(point.dist.locate_file("")) for point in points}),
    "recipe": str(shipped_recipes()["quickstart"]),
    "torch": torch.__file__,
}))
"""


def test_fastloop_is_the_wheel_as_import_and_as_metadata(clean_venv, tmp_path):
    done = clean_venv.run("-W", "error", "-c", LOOK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    inside = str(clean_venv.folder)
    assert found.pop("points") == [found["fastloop"].removesuffix("/fastloop/__init__.py")], (
        "one fastloop, the imported one"
    )
    assert not found.pop("torch").startswith(inside)
    assert {key: path for key, path in found.items() if not path.startswith(inside)} == {}


def test_wheel_has_types(fastloop_wheel):
    with zipfile.ZipFile(fastloop_wheel) as files:
        found = {name for name in files.namelist() if name.endswith(("py.typed", ".pyi"))}
    assert found == {
        "fastloop/hook_types.pyi",
        "fastloop/py.typed",
        "fastloop_plugins/py.typed",
        "fastloop_tools/py.typed",
    }


def test_its_command_runs(clean_venv, tmp_path):
    done = clean_venv.run(clean_venv.python.with_name("fastloop"), "--version", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fastloop ")


def test_a_venv_whose_creation_failed_is_made_again(tmp_path):
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (tmp_path / "beside0-venv").mkdir()
    venv = CleanVenv(folder)
    done = venv.run("-c", "import pytest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder / "mine").touch()
    CleanVenv(folder)
    assert (folder / "mine").exists(), "a complete one is used as it is"
