"""fastloop without what Windows and macOS lack: a process in which it is hidden before fastloop is imported.

Modules:
    core/fastloop/runtime/memory.py
    core/fastloop/runtime/platform_support.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import psutil
import pytest

import fastloop
import fastloop_plugins
import fastloop_tools
from fastloop.checkpoint.lock import Lock
from fastloop.runtime.platform_support import host_memory

FORGET = """
import os, signal, sys

ours = ("fastloop", "fastloop_plugins", "fastloop_tools", "fastloop_cpu", "fastloop_migrate")
for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
    del sys.modules[name]  # other packages stay imported: they support each platform themselves
"""
HIDE = """
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, ("sched_getaffinity", "sched_setaffinity", "pread", "pwrite", "killpg", "setsid", "getpgid", "getuid")),
    (signal, ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP", "SIGALRM", "alarm", "sigwaitinfo", "pthread_sigmask")),
):
    for name in names:
        delattr(module, name)
"""
MSVCRT = """
import fcntl, types

posix = fcntl.lockf  # locks count bytes from the file's position on, as msvcrt does
sys.modules["msvcrt"] = types.SimpleNamespace(
    LK_NBLCK=fcntl.LOCK_EX | fcntl.LOCK_NB,
    LK_UNLCK=fcntl.LOCK_UN,
    locking=lambda file, mode, count: posix(file, mode, count, 0, os.SEEK_CUR),
)
"""
TRAIN = """
import sys

from fastloop.cli import main
from fastloop.runtime import platform_support

platform_support.RENAMES_OPEN_FOLDERS = False
for _ in range(2):  # the first run's folder is moved aside
    sys.argv = ["fastloop", "train", "recipe.yaml"]
    try:
        main()
    except SystemExit as done:
        assert not done.code
"""
RECIPE = """
model:
  config: {model_type: distilbert, dim: 32, n_layers: 1, n_heads: 2, hidden_dim: 64, max_position_embeddings: 32}
  tokenizer: {kind: word}
data:
  module: "fastloop_plugins.datasets.reviews:reviews"
  arguments: {train: 64, validation: 8, test: 8}
  text: text
  label: label
  max_length: 32
train: {epochs: 1, batch_size: 16, save_every: 2, device: cpu}
plugins:
  - allocator
  - cpu-affinity
  - checkpoint-best
  - dataloader-workers: {num_workers: 1}
  - token-cache
output: run
"""


def python(code: str) -> str:
    Path("code.py").write_text(code)
    done = forked.run("code.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    """Every module of the core, of the plugins and of the tools."""
    found = []
    for package in (fastloop, fastloop_plugins, fastloop_tools):
        root = Path(package.__file__).parent
        paths = [path for path in root.rglob("*.py") if path.stem not in ("__init__", "__main__")]
        found += [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in sorted(paths)]
    return found


@pytest.mark.slow
def test_every_module_imports_without_what_a_platform_may_lack():
    python(f"{FORGET}{HIDE}\nimport importlib, fastloop\nfor name in {modules()}:\n    importlib.import_module(name)")


@pytest.mark.slow
def test_a_recipe_trains_on_one_process_without_what_a_platform_may_lack():
    Path("recipe.yaml").write_text(RECIPE)
    python(FORGET + HIDE + TRAIN)
    for folder in ("run", "run.1"):
        summary = json.loads(Path(folder, "summary.json").read_text())
        assert summary["status"] == "completed"
        assert summary["steps"] == 4
        assert summary["peak_memory_bytes"] > 2**20
        assert summary["allocator"]["page_faults_a_step"] == 0
        assert not Path(folder, ".lock").read_bytes()


@pytest.mark.parametrize("locks", ["", MSVCRT], ids=["no locks", "msvcrt"])
def test_a_run_folder_is_locked_without_fcntl(locks):
    take = f"""{FORGET}{locks}{HIDE}
from pathlib import Path
from fastloop import RecipeError
from fastloop.checkpoint.lock import Lock
try:
    Lock(Path(), "recipe.yaml").release()
    print("free")
except RecipeError as error:
    print(error)
"""
    lock = Lock(Path(), "recipe.yaml")
    assert f"is in use by process {os.getpid()}" in python(take)
    lock.release()
    assert python(take) == "free\n"


def test_host_memory_is_at_most_that_of_the_machine():
    assert 2**20 < host_memory() <= psutil.virtual_memory().total
