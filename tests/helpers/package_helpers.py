"""Packages as their users get them: built as wheels, and installed into a venv of their own.

    venv = CleanVenv(folder, fastloop_wheel)
    venv.install(build_wheel(project, folder))
    done = venv.run("-m", "fastloop", "train", "recipe.yaml", cwd=folder)

``fastloop_wheel`` is a fixture of ``conftest.py``, and so is ``clean_venv``, which has fastloop alone. No index is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from build import ProjectBuilder
from pyproject_hooks import quiet_subprocess_runner

ROOT = Path(__file__).resolve().parents[2]
"""fastloop's own project."""


def build_wheel(project: Path, into: Path) -> Path:
    """Build a project's wheel into a folder, with the backend that is installed here; returns the wheel's path."""
    return Path(ProjectBuilder(project, runner=quiet_subprocess_runner).build("wheel", into))


class CleanVenv:
    """A real venv in which nothing is installed but the given wheels.

    The site-packages of the interpreter that runs the tests come after the venv's own, so that torch is not installed again. Their
    ``.pth`` files do not count there: an editable fastloop, as a checkout has, is not on the venv's path.

    Attributes:
        folder: The venv's folder.
        python: Its interpreter.
    """

    def __init__(self, folder: Path, *wheels: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = Path(sysconfig.get_path("scripts", "venv", vars={"base": str(folder)}), "python")
        site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
        others = [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
        (site / "beside.pth").write_text("\n".join(others) + "\n")
        self.install(*wheels)

    def install(self, *wheels: Path) -> None:
        """Install wheels, without what they require: an index is not asked."""
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", self.python]
        # what is installed beside the venv under the same name, an editable fastloop first of all, is no reason to leave one out
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "--ignore-installed", *wheels], check=True)

    def run(self, *arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the venv's Python in a folder: ``run("-m", "fastloop", "plugins", cwd=folder)``. Its output is text; it may fail."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
        own |= {"VIRTUAL_ENV": str(self.folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
        return subprocess.run([self.python, *arguments], cwd=cwd, env=own, capture_output=True, text=True, timeout=300)
