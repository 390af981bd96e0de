"""cpu-affinity: threads, pinning, and how threads wait."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys

import pytest
import torch
from fastloop import Plugin, hookimpl
from fastloop.cli import startup
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.speedup_estimates import StepProfile
from fastloop_plugins.toolkit import ForeignLoad, cores

from fastloop_cpu.cpu_affinity import CpuAffinity


def test_threads_are_set_for_the_run_and_put_back(tiny_run, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    seen = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_step(self):
            seen.append((torch.get_num_threads(), (torch.tensor(1e-38) * 1e-3).item()))

    before = torch.get_num_threads(), os.sched_getaffinity(0)
    result = tiny_run([CpuAffinity(count=2), Watch()], epochs=1)
    assert set(seen) == {(2, 0.0)}
    assert result.summary["threads"] == 2
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert (torch.tensor(1e-38) * 1e-3).item() > 0


def test_processes_of_a_machine_share_its_processors(tiny_run, monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor cannot be shared")
    seen = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_step(self):
            seen.append((frozenset(os.sched_getaffinity(0)), torch.get_num_threads()))

    every = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    tiny_run([CpuAffinity(), Watch()], epochs=1)
    assert set(seen) == {(frozenset(every[: len(every) // 2]), len(every) // 2)}


@pytest.mark.parametrize(
    ("variable", "count", "processes", "threads"),
    [
        ("1", None, 1, 1),
        ("1,4", None, 1, 1),
        ("1", 2, 1, 2),
        ("none", None, 1, "all"),
        (None, None, 1, "all"),
        ("999", None, 1, "all"),
        ("1", None, 2, "half"),
    ],
)
def test_the_users_number_of_threads_is_kept_without_a_launcher(
    tiny_run, monkeypatch, caplog, variable, count, processes, threads
):
    """A launcher sets OMP_NUM_THREADS for each of several processes, torchrun to 1, so it does not count there."""
    caplog.set_level(logging.INFO, "fastloop")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    available = min(len(os.sched_getaffinity(0)), cores())
    expected = {"all": available, "half": max(1, available // 2)}.get(threads, threads)
    result = tiny_run([CpuAffinity(count=count, pin=False)], epochs=1)
    assert result.summary["threads"] == expected
    is_said = any("OMP_NUM_THREADS" in message for message in caplog.messages)
    follows = variable in ("1", "1,4") and (count is None and processes == 1)
    overridden = variable == "1" and expected != 1
    assert is_said == (follows or overridden or variable == "999")


@pytest.mark.parametrize(
    ("wait", "others", "expected"),
    [
        ("auto", 1.0, "passive"),
        ("auto", 0.1, None),
        ("passive", 0.1, "passive"),
        ("active", 1.0, "active"),
        (None, 1.0, None),
    ],
)
def test_waiting_threads_sleep_if_the_recipe_or_the_load_of_other_programs_asks_for_it(
    wait, others, expected, monkeypatch
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(ForeignLoad, "cores", lambda _: others)  # no test can make sure that a machine is idle
    recipe = make_recipe({"plugins": [{"cpu-affinity": {"wait": wait}}]})
    found = startup.environment(resolve(recipe, any_machine=True))
    assert found == ({"OMP_WAIT_POLICY": expected} if expected else {})


def test_a_policy_of_the_users_environment_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(ForeignLoad, "cores", lambda _: 1.0)
    assert startup.environment(resolve(make_recipe({"plugins": ["cpu-affinity"]}), any_machine=True)) == {}


def test_a_busy_machine_makes_it_worth_a_line(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    profile = StepProfile(device="cpu", cores=2, threads=2, seconds=1.0, foreign_cores=0.98)
    estimate = CpuAffinity.estimate_speedup(profile, make_recipe({}))
    assert estimate is not None
    assert estimate.why == "Other programs use 1.0 of 2 cores, and threads that wait for each other spin."
    assert CpuAffinity.estimate_speedup(dataclasses.replace(profile, foreign_cores=0.1), make_recipe({})) is None
    assert CpuAffinity.estimate_speedup(dataclasses.replace(profile, seconds=0.02), make_recipe({})) is None
    single = dataclasses.replace(profile, threads=1)
    assert CpuAffinity.estimate_speedup(single, make_recipe({})) is None, (
        "one thread waits for no other, and the second core is busy"
    )
    idle = dataclasses.replace(single, foreign_cores=0.0)
    assert CpuAffinity.estimate_speedup(idle, make_recipe({})) is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert CpuAffinity.estimate_speedup(idle, make_recipe({})) is None, "the plugin keeps the user's single thread"


@pytest.mark.slow
def test_waiting_threads_of_a_training_process_sleep(tmp_path):
    """libgomp shows its settings when it is loaded. It reads them only then, so the variable must be set before torch
    is imported."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {files: {train: none.csv}, text: text, label: label}\nmodel: {name: nowhere}\nplugins: [{cpu-affinity: "
        "{wait: passive}}]\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | {
        "OMP_DISPLAY_ENV": "true"
    }
    command = [sys.executable, "-m", "fastloop", "train", str(recipe)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("torch uses another OpenMP")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
