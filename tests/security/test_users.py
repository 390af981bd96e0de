"""Two users on one machine.

Only root can start a process of another user, so these tests need it: CI's containers run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference_runs import write_recipe
from long_form import long_form_only

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be two users"),
]

OTHER = 12345
"""A user who has no name and no home folder."""
TRAIN = ("train", "recipe.yaml", "--without", "progress")


def runs(python: str) -> bool:
    """Whether the other user can run a Python with the packages of this one."""
    try:
        command = [sys.executable, "-c", "import torch"]
        return (
            subprocess.run(
                command, executable=python, user=OTHER, capture_output=True, check=False, timeout=600
            ).returncode
            == 0
        )
    except OSError:
        return False


CLOSED = {
    "sweep": ("sweep", "recipe.yaml", "train.lr=1e-3,1e-4", "output=closed"),
    "search": ("sweep", "recipe.yaml", "train.lr=1e-3,1e-4", "output=closed", "--trials", "2", "--mode", "min"),
    "bench": ("bench", "recipe.yaml", "--output", "closed"),
    "profile": ("profile", "recipe.yaml", "--output", "closed"),
    "train": (*TRAIN, "output=closed"),
}
"""Name -> a command that writes into the folder ``closed``."""


@pytest.fixture(scope="module")
def python() -> str:
    """A Python that both users can run: this one may lie in the home folder of root."""
    version = ".".join(map(str, sys.version_info[:2]))
    found = next(filter(runs, (sys.executable, f"/usr/bin/python{version}")), None)
    if found is None:
        pytest.skip("another user cannot run this Python")
    return found


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may write to; those above ``tmp_path`` are pytest's alone."""
    folder = Path(tempfile.mkdtemp(prefix="two-users-"))
    train = {"max_steps": 2, "save_every": 2, "batch_size": 8, "lr": 1e-2, "device": "cpu"}
    write_recipe(folder, plugins=["token-cache"], train=train, output="run")
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fastloop(python: str, public: Path) -> Any:
    """Run a command as a user."""

    def run(*arguments: str, user: int = 0, umask: int = 0o022, **env: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")} | env
        done = subprocess.run(
            [sys.executable, "-m", "fastloop", *arguments],
            executable=python if user else None,
            cwd=public,
            env=own,
            user=user,
            group=user,
            extra_groups=[],
            umask=umask,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done

    return run


def error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_cache_of_two_users(public, fastloop):
    """a folder of token ids that two users share: each has its own"""
    (public / "cache").mkdir()
    (public / "cache").chmod(0o1777)
    for user in (0, OTHER, OTHER):
        done = fastloop(*TRAIN, "plugins.token-cache.folder=cache", f"output=run-{user}", user=user)
        assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (public / "cache").iterdir()) == ["user-0", f"user-{OTHER}"]
    assert done.stdout.count("texts from cache/user-") == 3


@pytest.mark.parametrize("name", CLOSED)
def test_an_empty_folder_of_another_user(public, fastloop, name):
    """an empty output folder that this user may not write to: refused before training, by the same code"""
    if name == "search":
        pytest.importorskip("optuna")
    (public / "closed").mkdir(mode=0o555)
    refused = error(fastloop(*CLOSED[name], user=OTHER, XDG_CACHE_HOME=str(public)))
    assert refused.endswith("Give another folder. [folder-not-writable]")
    assert list((public / "closed").iterdir()) == []


def test_another_users_run_folder(public, fastloop):
    """the run folder and cache of another user, and a user without a home folder: one line of error"""
    without = ("--without", "token-cache")
    assert fastloop(*TRAIN, *without).returncode == 0
    before = contents(public)
    assert "run" in error(fastloop(*TRAIN, *without, user=OTHER))
    # it may read the checkpoint, and not write beside it
    assert "output: run cannot be written" in error(fastloop(*TRAIN, *without, "--resume", user=OTHER))
    (public / "run").chmod(0o777)
    assert "run/.lock: Permission denied" in error(fastloop(*TRAIN, *without, user=OTHER))
    assert "home folder" in error(fastloop(*TRAIN, "output=new", user=OTHER))
    assert "token-cache.folder" in error(fastloop(*TRAIN, "output=new", user=OTHER, HOME="/root"))
    assert contents(public) == before


@pytest.mark.parametrize("umask", [0o077, pytest.param(0o000, marks=long_form_only), 0o777])
def test_a_umask(umask, public, fastloop):
    """any umask: the run resumes, or one line of error"""
    done = fastloop(*TRAIN, "--without", "token-cache", user=OTHER, umask=umask)
    if umask == 0o777:
        assert "cannot be saved" in error(done)
        assert not (public / "run").exists()
        return
    assert done.returncode == 0, done.stdout + done.stderr
    done = fastloop(*TRAIN, "--without", "token-cache", "--resume", "train.max_steps=4", user=OTHER, umask=umask)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (public / "run").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (public / "run/summary.json").stat().st_mode & 0o777 == 0o666 & ~umask
