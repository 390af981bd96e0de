"""profile: traces with the loop's regions and plugins' hooks by name; and the regions themselves.

Modules:
    core/fastloop/plugins/hook_replacement.py
    core/fastloop/runtime/regions.py
    plugins/fastloop_plugins/observe/_hook_regions.py
    plugins/fastloop_plugins/observe/profile.py
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop import Plugin, hookimpl
from fastloop.errors import PluginCrash
from fastloop.runtime import regions
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.observe.profile import Profile


class Sleepless(Plugin):
    """Has a hook of its own, and a wrapper."""

    name = "sleepless"

    @hookimpl
    def before_step(self) -> None:
        torch.ones(3)

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Any:
        return (yield)


def traces(folder: Path) -> list[Counter[str]]:
    """How often each name of ours is in each trace of a run."""
    found = []
    for path in sorted((folder / "profile").glob("rank0.*.pt.trace.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
        found.append(Counter(event["name"] for event in spans if event["name"].startswith("fastloop/")))
    return found


def test_a_trace_has_the_loops_regions_and_plugins_hooks_by_name(tiny_run):
    plugins = [Sleepless(), Profile(wait=2, warmup=1, active=3)]
    result = tiny_run(plugins, epochs=1, max_grad_norm=1.0, micro_batch_size=4)
    (found,) = traces(result.trainer.run.folder)
    steps = {name: found[f"fastloop/{name}"] for name in ("optimizer", "clip", "sleepless.before_step")}
    assert steps == dict.fromkeys(steps, 3)
    assert [found[f"fastloop/{name}"] for name in ("data", "loss", "backward")] == [6, 6, 6], "two micro-steps a step"
    assert found["fastloop/sleepless.compute_loss"] == 12, "the code of a wrapper, before and after its yield"
    assert "fastloop/loss" in (result.trainer.run.folder / "profile" / "rank0.operations.txt").read_text()


@pytest.mark.slow
def test_it_trains_the_same_and_leaves_hooks_as_they_were(tiny_run):
    plain = tiny_run([Sleepless()])
    profiled = tiny_run([Sleepless(), Profile(wait=0, warmup=1, active=1, shapes=True, stacks=True, memory=True)])
    assert profiled.losses == plain.losses
    run = profiled.trainer.run
    functions = [impl.function for plugin in run.plugins for impl, _ in run.plugins.manager.implementations(plugin)]
    assert functions
    assert not any("enclose" in function.__code__.co_qualname for function in functions)


def test_it_can_look_more_than_once(tiny_run):
    result = tiny_run([Profile(wait=1, warmup=1, active=1, repeat=3)])
    assert [found["fastloop/optimizer"] for found in traces(result.trainer.run.folder)] == [1, 1, 1]


@pytest.mark.slow
def test_evaluation_and_saving_have_names(tiny_run):
    result = tiny_run([Profile(wait=0, warmup=1, active=30)], epochs=2, save_every="epoch")
    found = traces(result.trainer.run.folder)[0]
    assert found["fastloop/evaluate"] >= 1
    assert found["fastloop/save"] >= 1


@pytest.mark.parametrize("wait", [500, 16])  # with 16, the run of 18 steps ends after the warm-up
def test_a_run_that_ends_too_early_says_so(tiny_run, caplog, wait):
    result = tiny_run([Profile(wait=wait)])
    assert_problem(caplog, "nothing-recorded profile 18 wait")
    assert not traces(result.trainer.run.folder)


def test_it_logs_the_steps_that_were_recorded(tiny_run, caplog):
    with caplog.at_level("INFO"):
        tiny_run([Profile(wait=1, warmup=1, active=5, repeat=0)], max_steps=10)
    written = [line for line in caplog.messages if "written to" in line]
    assert [line.split(" written")[0] for line in written] == ["profile: 5 steps", "profile: 1 step"]


def test_a_failing_run_ends_the_profiler(tiny_run):
    class Fails(Plugin):
        name = "fails"

        @hookimpl
        def after_step(self) -> None:
            raise RuntimeError("planted")

    with expect_problem("plugin-crashed planted", PluginCrash):
        tiny_run([Profile(wait=0, warmup=1, active=5), Fails()])
    assert not torch.autograd.profiler._is_profiler_enabled
    tiny_run([Profile(wait=0, warmup=1, active=1)])


def test_a_region_without_a_profiler_is_an_empty_context():
    assert regions.region("data") is regions.NO_CONTEXT
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, regions.region("data"):
        pass
    assert {event.key: event.count for event in profiler.key_averages()}["fastloop/data"] == 1
