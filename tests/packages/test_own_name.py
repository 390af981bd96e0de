"""The name ``fastloop`` on the package index is another project's: fastloop never installs it, nor starts with it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from package_helpers import CleanVenv, build_wheels

from fastloop.plugins.packages import DISTRIBUTION

STRANGER = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fastloop"
version = "0.1.128"
"""


@pytest.fixture
def index(tmp_path: Path, fastloop_wheel: Path) -> Path:
    """A package index, as a folder, that has both projects."""
    project = tmp_path / "stranger"
    (project / "fastloop").mkdir(parents=True)
    (project / "pyproject.toml").write_text(STRANGER)
    (project / "fastloop" / "__init__.py").write_text("AGENTS = True\n")
    build_wheels(tmp_path / "index", project)
    (tmp_path / "index" / fastloop_wheel.name).symlink_to(fastloop_wheel)
    return tmp_path / "index"


def install(venv: CleanVenv, index: Path, *requirements: str) -> None:
    """Install requirements from the index, and nothing that they require."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", venv.python, "install"]
    subprocess.run(
        [*pip, "--no-deps", "--no-index", "--find-links", index, "--ignore-installed", *requirements],
        check=True,
        timeout=600,
    )


def installed(venv: CleanVenv) -> set[str]:
    """Names of the distributions in the venv."""
    return {path.name.partition("-")[0] for path in venv.folder.rglob("*.dist-info")}


@pytest.mark.slow
def test_a_new_package_and_a_job_install_this_fastloop(clean_venv, index, tmp_path):
    assert clean_venv.run("-m", "fastloop", "new", "plugin", "night-watch", cwd=tmp_path).returncode == 0
    (wanted,) = tomllib.loads((tmp_path / "night-watch" / "pyproject.toml").read_text())["project"]["dependencies"]
    (tmp_path / "recipe.yaml").write_text("output: runs/quick\n")
    done = clean_venv.run("-m", "fastloop", "new", "job", "recipe.yaml", "--kubernetes", "--skypilot", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in (tmp_path / "job").iterdir()]
    jobs = {name for text in texts for name in re.findall(r"pip install (?:--\S+ )*(\S+)", text)}
    assert len(jobs) == 1
    for number, requirement in enumerate((wanted, *jobs)):
        venv = CleanVenv(tmp_path / f"venv{number}")
        install(venv, index, requirement)
        assert installed(venv) == {"fastloop_train"}
        assert venv.run("-m", "fastloop", "--version", cwd=tmp_path).stdout.startswith("fastloop ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [("fastloop", DISTRIBUTION), (DISTRIBUTION, "fastloop")], ids=["ours last", "ours first"]
)
def test_a_start_with_both_is_an_error_that_names_what_to_remove(index, tmp_path, order):
    venv = CleanVenv(tmp_path / "both")
    for name in order:
        install(venv, index, name)
    assert installed(venv) == {"fastloop", "fastloop_train"}
    done = venv.run("-m", "fastloop", "plan", "quickstart", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line, code = done.stderr.splitlines()
    assert line.startswith("error: two distributions with the import name fastloop are installed")
    assert line.endswith("pip uninstall --yes fastloop fastloop-train && pip install fastloop-train")
    assert code == "[broken-installation]"
