"""The exchanges of strategies on two real processes: how many a step needs, over which group, and how long a process
waits.

Modules:
    core/fastloop/step_totals.py
    plugins/fastloop_plugins/strategies/_timeout.py
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Plugin, Run, UsageError, hookimpl
from fastloop.plugins.installed import load
from fastloop.plugins.manager import PluginSet
from fastloop.recipe import make_recipe
from fastloop.testing import VECTORS, expect_problem, starting, train

pytestmark = pytest.mark.slow

TIMEOUT = 4.0
"""Seconds that a process waits for one that hangs: a loaded machine may stall a process for a second or two."""
LATE = 3.0
"""Seconds by which the second process is late, far above the time of a forward pass on a loaded machine."""
HANGS = 60.0
"""Seconds that the other process hangs, far above ``TIMEOUT``."""
STRATEGIES = ("ddp", "fsdp", "deepspeed", "tensor-parallel")


class Normed(nn.Sequential):
    """A model whose batch norm changes buffers in training."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Scaled(nn.Linear):
    """A model whose only buffer is a constant that is not saved."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


class Watch(Plugin):
    """Counts the calls of ``torch.distributed.all_reduce`` in each step, and of functions over the default group in
    saves and loads."""

    name = "reductions"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.reductions, self.over_default_group = 0, Counter[str]()
        self.broadcasts = False

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self.broadcasts = getattr(run.model, "broadcast_buffers", False)
        reduce = torch.distributed.all_reduce

        def counted(*arguments: Any, **options: Any) -> Any:
            self.reductions += 1
            return reduce(*arguments, **options)

        torch.distributed.all_reduce = counted

    @hookimpl(tryfirst=True)
    def before_step(self) -> None:
        self.steps.append(self.reductions)

    @hookimpl
    def teardown(self) -> None:
        self.steps = [after - before for before, after in zip(self.steps, self.steps[1:], strict=False)]


class HostGroup(Plugin):
    """Gives the run a host group of its own, as on a GPU, and counts the exchanges of objects over the default
    group."""

    name = "host-group"
    over = Counter[str]()

    def __init__(self) -> None:
        super().__init__()
        self.replaced: dict[str, Any] = {}

    @hookimpl
    def before_prepare(self, run: Run) -> None:
        run.processes.host_group = run.processes.new_host_group()
        names = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "barrier")
        self.replaced = {name: getattr(torch.distributed, name) for name in names}
        for name, function in self.replaced.items():
            setattr(torch.distributed, name, self.count(function))

    @hookimpl
    def teardown(self) -> None:
        for name, function in self.replaced.items():
            setattr(torch.distributed, name, function)

    def count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted by its group."""

        def call(*arguments: Any, **options: Any) -> Any:
            group = options.get(
                "group", next((value for value in arguments if isinstance(value, torch.distributed.ProcessGroup)), None)
            )
            self.over["default" if group in (None, torch.distributed.group.WORLD) else "host"] += 1
            return function(*arguments, **options)

        return call


class Hangs(Plugin):
    """Stops the second process in the third step, for longer than the other waits."""

    name = "hangs"

    @hookimpl
    def before_step(self, run: Run) -> None:
        if run.rank == 1 and run.state.step == 2:
            time.sleep(HANGS)


class Late(Plugin):
    """Lets the second process start the third step late, and keeps when each process is where in that step.

    Attributes:
        times: Clock readings of the third step: at its first forward, and when it may begin to train.
    """

    name = "late"

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, float] = {}

    @hookimpl(trylast=True)
    def before_step(self, run: Run) -> None:
        if run.state.step == 2:
            time.sleep(LATE * run.rank)
            self.times["begins"] = time.monotonic()

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Run) -> Any:
        result = yield
        if run.state.step == 2:
            self.times["forward"] = time.monotonic()
        return result


def recipe(strategy: Any, model: str | None = None, **settings: Any) -> dict[str, Any]:
    """A recipe of the tiny task without metrics, which exchange objects too, and with a model of this file."""
    tree: dict[str, Any] = {**VECTORS, "plugins": [{"module": {"loss": "cross_entropy"}}, strategy], "output": "run"}
    tree["model"] = {"module": f"test_process_group:{model}"} if model else VECTORS["model"]
    return tree | {
        "train": {"batch_size": 4, "lr": 1e-2, "device": "cpu", "max_steps": 4, "save_every": None} | settings
    }


def watched(strategy: Any, model: str | None) -> tuple[list[int], bool]:
    """Reductions of each step but the last, and whether DDP broadcasts buffers."""
    watch = Watch()
    train(recipe(strategy, model, log_every=1000), watch)
    return watch.steps, watch.broadcasts


def late() -> dict[str, float]:
    """The times of a run whose second process is late."""
    plugin = Late()
    train(recipe("ddp"), plugin)
    return plugin.times


def saved(name: str) -> Counter[str]:
    """Save after two steps and resume; the exchanges of objects by group."""
    train(recipe(name, max_steps=2, save_every=1), HostGroup())
    train(recipe(name, max_steps=4), HostGroup(), resume=Path("run"))
    return HostGroup.over


def hangs(strategy: Any) -> None:
    """A run whose second process hangs."""
    train(recipe(strategy), Hangs())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_needs_three_reductions(processes, tmp_path, strategy):
    for ended in processes(2, watched, strategy, None, folder=tmp_path):
        assert set(ended.result[0]) == {3}, "its totals, its loss, and requests"


def test_a_forward_pass_does_not_wait_for_the_totals_of_the_step(processes, tmp_path):
    first, second = (ended.result for ended in processes(2, late, folder=tmp_path))
    assert first["forward"] < second["begins"]


@pytest.mark.parametrize(("model", "broadcasts"), [("Normed", True), ("Scaled", False), (None, False)])
def test_ddp_broadcasts_buffers_only_where_training_may_change_them(processes, tmp_path, model, broadcasts):
    assert processes(2, watched, "ddp", model, folder=tmp_path)[0].result[1] is broadcasts


def test_shards_are_exchanged_over_the_host_group(processes, tmp_path):
    for ended in processes(2, saved, "fsdp", folder=tmp_path):
        assert ended.result["host"] > 0
        assert ended.result["default"] == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_timeout_is_an_option_of_each_strategy(name):
    for given, seconds in ((None, None), (90, 90.0), (1.5, 1.5), ("10m", 600.0)):
        plugin = load(name)(timeout=given)
        assert PluginSet([plugin]).configure(make_recipe({})).process_timeout == seconds
    with expect_problem(f"wrong-format {name}", UsageError):
        PluginSet([load(name)(timeout="soon")]).configure(make_recipe({}))


def test_a_process_that_hangs_is_noticed_within_the_timeout(tmp_path):
    started = time.monotonic()
    first, _ = starting.start(2, hangs, {"ddp": {"timeout": f"{TIMEOUT}s"}}, folder=tmp_path)
    assert time.monotonic() - started < HANGS
    assert first.code not in (0, None)
    assert re.search(r"process 0 of 2 .*timeout", first.output), first.output
