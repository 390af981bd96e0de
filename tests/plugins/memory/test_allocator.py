"""allocator: the same numbers, and far fewer pages faulted in.

Modules:
    plugins/fastloop_plugins/memory/allocator.py
"""

from __future__ import annotations

import ctypes.util
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from long_form import long_form_only

from fastloop import PluginError, hookimpl
from fastloop.cli import startup
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.memory.allocator import CUDA_SETTINGS, Allocator

STEPS = """
import json, resource, sys
import torch
from torch import nn
from fastloop import Plugin, Trainer, hookimpl
from fastloop_plugins.memory.allocator import Allocator

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 3))
rows = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
losses, faults = [], []

class Counts(Plugin):
    "Page faults up to each step: those of the start differ from machine to machine."
    name = "counts"

    @hookimpl
    def after_step(self):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

added = [Allocator(allocator="glibc")] if sys.argv[1] == "with" else []
plugins = [{"log": False}, {"progress": False}, Counts(), *added]
def loss(predictions, targets):
    losses.append(nn.functional.cross_entropy(predictions, targets))
    return losses[-1]
trainer = Trainer(model, torch.utils.data.TensorDataset(rows, rows[:, :3].argmax(1)), plugins=plugins, loss=loss,
                  batch_size=512, epochs=12, save_every=None, output=sys.argv[1], device="cpu")
summary = trainer.fit()
made = {"losses": [value.item() for value in losses]}
made |= {"faults": faults[-1] - faults[9], "allocator": summary.get("allocator")}
print(json.dumps(made))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's on Linux only")
def test_pages_are_kept_from_step_to_step_and_numbers_are_the_same():
    found = {}
    variables = Allocator(allocator="glibc").environment(make_recipe({"train": {"device": "cpu"}}))
    for name in ("with", "without"):
        environment = os.environ | (variables if name == "with" else {})
        done = subprocess.run(
            [sys.executable, "-c", STEPS, name],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
        found.setdefault("said", done.stderr)
    assert found["with"]["losses"] == found["without"]["losses"]
    assert found["with"]["faults"] < 0.2 * found["without"]["faults"], found
    assert "returned to the system" not in found["said"]
    assert found["with"]["allocator"]["page_faults_a_step"] > 0
    assert found["without"]["allocator"] is None


def test_a_run_goes_on_with_it(tiny_run, tmp_path):
    whole = tiny_run([Allocator()], device="cpu")
    tiny_run([Allocator()], device="cpu", max_steps=9, save_every=9, output=tmp_path / "cut")
    rest = tiny_run([Allocator()], device="cpu", output=tmp_path / "cut", resume=True)
    assert rest.losses == whole.losses[9:]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's on Linux only")
def test_allocator_in_python_logs_required_environment(tiny_run, caplog, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    tiny_run([Allocator(allocator="glibc")], device="cpu", epochs=1)
    assert_problem(caplog, "no-effect allocator GLIBC_TUNABLES=glibc.malloc.mmap_max=0:")


def test_allocator_logs_other_system_allocator(tiny_run, caplog, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    tiny_run([Allocator()], device="cpu", epochs=1)
    assert_problem(caplog, "no-effect allocator: glibc's")


MODULE = """
import json, os, pathlib
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        kept = {name: os.environ.get(name) for name in ("LD_PRELOAD", "GLIBC_TUNABLES")}
        maps = pathlib.Path("/proc/self/maps").read_text()
        kept |= {name: name in maps for name in ("tcmalloc", "jemalloc")}
        # as it was when the process began
        kept["start"] = pathlib.Path("/proc/self/environ").read_text().strip("\\0").split("\\0")
        pathlib.Path("seen.json").write_text(json.dumps(kept | {"pid": os.getpid()}))
        if os.environ.get("END_HERE"):  # the test needs no training
            os._exit(0)

def data():
    return {"train": torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))}
"""
RECIPE = """
model: {module: "own.py:Model"}
data: {module: "own.py:data"}
train: {epochs: 1, batch_size: 8, device: cpu}
plugins: [{module: {loss: cross_entropy}}, {allocator: {allocator: ALLOCATOR}}]
output: run
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's on Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["auto", pytest.param("glibc", marks=long_form_only), "tcmalloc", "jemalloc"])
def test_the_command_line_starts_itself_again_with_the_allocator(allocator, tmp_path):
    names = {"tcmalloc": ("tcmalloc_minimal", "tcmalloc"), "jemalloc": ("jemalloc",)}
    installed = [name for name, found in names.items() if any(map(ctypes.util.find_library, found))]
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("ALLOCATOR", allocator))
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "GLIBC_TUNABLES")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "fastloop", "train", "recipe.yaml"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, said = process.communicate(timeout=60)
    if allocator in names and allocator not in installed:
        assert process.returncode == 2
        assert f"plugins.allocator.allocator: {allocator} is not installed" in said
        return
    assert process.returncode == 0, said
    seen = json.loads((tmp_path / "seen.json").read_text())
    chosen = allocator if allocator != "auto" else "tcmalloc" if "tcmalloc" in installed else "glibc"
    assert seen["pid"] == process.pid  # the same process: a scheduler's signals reach it
    assert {name: seen[name] for name in names} == {name: name == chosen for name in names}
    assert (seen["GLIBC_TUNABLES"] is not None) == (chosen == "glibc")
    assert json.loads((tmp_path / "run/summary.json").read_text())["allocator"]["allocator"] == chosen


@pytest.mark.parametrize("allocator", ["tcmalloc", "jemalloc"])
def test_an_allocator_that_is_not_installed_is_refused(allocator, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with expect_problem(f"not-installed plugins.allocator.allocator {allocator}", PluginError):
        Allocator(allocator=allocator).environment(make_recipe({"train": {"device": "cpu"}}))


@pytest.mark.slow
def test_user_environment_is_kept(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("ALLOCATOR", "glibc"))
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2", "END_HERE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-m", "fastloop", "train", "recipe.yaml"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        timeout=600,
    )
    assert json.loads((tmp_path / "seen.json").read_text())["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


WITH_NVIDIA = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path, **options: str(path) == "/dev/nvidiactl" or exists(path, **options)
"""
"""Makes a Python that finds it look like one on a machine with an NVIDIA driver."""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc")
@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    ],
    ids=["unset", "set by the old name"],
)
def test_on_cuda_the_command_line_starts_itself_again_with_growing_segments(given, seen, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITH_NVIDIA)
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("ALLOCATOR", "glibc").replace("device: cpu", "device: auto"))
    environment = {key: value for key, value in os.environ.items() if key not in CUDA_SETTINGS}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path])), "END_HERE": "1"} | given
    subprocess.run(
        [sys.executable, "-m", "fastloop", "train", "recipe.yaml"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        timeout=600,
    )
    start = dict(line.split("=", 1) for line in json.loads((tmp_path / "seen.json").read_text())["start"])
    assert {name: start[name] for name in CUDA_SETTINGS if name in start} == seen


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch cannot read its settings back"
)
@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32", "PYTORCH_ALLOC_CONF": ""},
            "max_split_size_mb:32,expandable_segments:True",
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:32,backend:cudaMallocAsync"},
            "max_split_size_mb:32,backend:cudaMallocAsync",
        ),
    ],
)
def test_in_a_process_that_runs_growing_segments_join_the_users_settings(given, settings, monkeypatch):
    for name in CUDA_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    users = next(iter(given.values()), "")
    try:
        for device, expected in (("cpu", users), ("cuda", settings)):
            torch._C._accelerator_setAllocatorSettings(users)
            Allocator().before_prepare(run=SimpleNamespace(device=torch.device(device)))
            assert torch._C._accelerator_getAllocatorSettings() == expected
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_plugins_that_want_different_variables_are_both_named(monkeypatch):
    from fastloop.plugins.resolve import resolve
    from fastloop_plugins.training.ema import EMA

    monkeypatch.setattr(Allocator, "environment", hookimpl(lambda self, recipe: {"A": "1"}))
    monkeypatch.setattr(EMA, "environment", hookimpl(lambda self, recipe: {"A": "2"}), raising=False)
    recipe = make_recipe({"plugins": ["allocator", "ema"], "train": {"epochs": 1}})
    with expect_problem("conflicting-values 'ema' 'allocator' '2' '1'", PluginError):
        startup.environment(resolve(recipe, any_machine=True))
