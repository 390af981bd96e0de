"""Packages in the form that users get: built as wheels, and installed into a separate venv.

    venv = CleanVenv(folder, fastloop_wheel)
    venv.install(*build_wheels(folder, project))
    done = venv.run("-m", "fastloop", "train", "recipe.yaml", cwd=folder)

``fastloop_wheel`` is a fixture of ``conftest.py``, and so are ``clean_venv``, which has fastloop alone, and
``own_venv``, into which a test may install more. No package index is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path

import limited

from fastloop.testing.time_limits import kill_group

ROOT = Path(__file__).resolve().parents[2]
"""fastloop's own project."""
LIMIT = 840.0
"""Seconds that a command of a venv may take: less than the time limit of a test, so that its output is shown."""


FORKS = """
import json, os, runpy, sys, traceback
import accelerate, datasets, torchmetrics.classification
import fastloop.default_hooks, fastloop.lifecycle
for line in sys.stdin:
    folder, arguments, streams, variables = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(variables)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(streams, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            sys.argv = ["fastloop", *arguments]
            runpy.run_module("fastloop", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Reads commands, and runs each in a process forked from this one, which has imported torch."""


BUILDS = """
import os, sys
from hatchling.build import build_wheel
for project in sys.argv[2:]:
    os.chdir(project)
    print(build_wheel(sys.argv[1]))
"""
"""Builds the wheels of several projects in one process, with the backend that each of them names."""


SUITES = """
import os, sys
from multiprocessing import forkserver, resource_tracker
import pytest, transformers
from fastloop.testing import starting
starting.PRELOADED.append("peft")  # takes a second of each process that trains or loads an adapter
starting._context()
server = forkserver._forkserver
server.ensure_running()
server.ensure_running = resource_tracker.ensure_running  # in a suite, whose child the server is not
selected = [] if "FASTLOOP_RELIABILITY" in os.environ else ["-m", "not slow", "-k", "not ConformanceOf"]
codes = []
for folder in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        os.chdir(folder)
        ignored = "ignore::pytest.PytestAssertRewriteWarning"  # fastloop.testing is imported above
        options = ["-q", "-W", "error", "-W", ignored, "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main([*options, *selected, "tests"])
        sys.stdout.flush()
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
sys.exit(any(codes))
"""
"""Runs the tests of several projects, each in a process forked from this one, so that all share its imports and its
server of forked processes. Slow tests, and a second conformance class of a project, which takes a minute, run in the
long form alone: see ``long_form.py``."""


def build_wheels(into: Path, *projects: Path) -> list[Path]:
    """Build the wheels of projects into a folder, with the hatchling that is installed here; returns their paths."""
    into.mkdir(exist_ok=True)
    for project in projects:
        assert 'build-backend = "hatchling.build"' in (project / "pyproject.toml").read_text(encoding="utf-8")
    command = [sys.executable, "-c", BUILDS, into.resolve(), *projects]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return [into / name for name in done.stdout.split()]


def link_without_ours(packages: Path, folder: Path) -> Path:
    """Fill a folder with links to everything in a folder of packages, except metadata of the project's own packages. An
    editable install leaves it there, and its plugins would be listed and could not be imported."""
    folder.mkdir()
    for path in packages.iterdir():
        if not (path.name.startswith("fastloop_") and path.name.endswith(".dist-info")):
            (folder / path.name).symlink_to(path)
    return folder


class CleanVenv:
    """A real venv in which nothing is installed but the given wheels.

    The site-packages of the interpreter that runs the tests come after the venv's own, so that torch is not installed
    again. Their ``.pth`` files do not count there, nor does the metadata of fastloop and its packages: an editable
    install, as a checkout has, is not on the venv's path.

    Args:
        folder: Its folder. A complete venv that is there already is used as it is. One whose creation failed halfway
            is made again.

    Attributes:
        python: Its interpreter.
    """

    def __init__(self, folder: Path, *wheels: Path) -> None:
        self.folder = folder
        self.python = Path(sysconfig.get_path("scripts", "venv", vars={"base": str(folder)}), "python")
        complete = folder / "complete"
        if complete.exists():
            return
        for unfinished in (folder, *folder.parent.glob(f"beside*-{folder.name}")):
            if unfinished.exists():
                shutil.rmtree(unfinished)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=600)
        site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
        others = [Path(path) for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
        beside = [
            link_without_ours(other, folder.with_name(f"beside{index}-{folder.name}"))
            for index, other in enumerate(others)
        ]
        (site / "beside.pth").write_text("\n".join(map(str, beside)) + "\n")
        if wheels:
            self.install(*wheels)
        complete.touch()

    def install(self, *wheels: Path) -> None:
        """Install wheels, without what they require: an index is not asked."""
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", self.python]
        # what is installed beside the venv under the same name, an editable fastloop first of all, is no reason to
        # leave one out
        subprocess.run(
            [*pip, "install", "--no-deps", "--no-index", "--ignore-installed", *wheels], check=True, timeout=600
        )

    def environment(self) -> dict[str, str]:
        """The environment variables of its commands."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
        return own | {"VIRTUAL_ENV": str(self.folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def run(self, *arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the venv's Python in a folder: ``run("-m", "fastloop", "plugins", cwd=folder)``. Its output is text; it
        may fail."""
        own = self.environment() | environment
        return limited.run([self.python, *arguments], LIMIT, cwd=cwd, env=own)


class ForkingPython:
    """``fastloop`` commands of a Python, in processes forked from one that has imported torch. Use it in a ``with``
    block.

    Packages beside it are found and imported by each command, as in a new Python.

    Args:
        python: Its interpreter.
        environment: All of its environment variables.
    """

    def __init__(self, python: str | Path, environment: Mapping[str, str]) -> None:
        self.command = [python, "-c", FORKS]
        self.environment = environment

    def __enter__(self) -> ForkingPython:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(self.command, env=self.environment, text=True, start_new_session=True, **pipes)
        return self

    def __exit__(self, *error: object) -> None:
        kill_group(self._server.pid)  # with a command that still runs
        self._server.communicate(timeout=60)

    def run(self, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``fastloop ARGUMENTS`` in a folder, with more variables. Its output is text; it may fail."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        streams = [cwd / ".stdout", cwd / ".stderr"]
        for stream in streams:
            stream.unlink(missing_ok=True)
        self._server.stdin.write(json.dumps([str(cwd), arguments, [*map(str, streams)], environment]) + "\n")
        self._server.stdin.flush()
        assert connection.wait([self._server.stdout], 300), "the command takes longer than 300 seconds"
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(stream.read_text(encoding="utf-8") for stream in streams))
