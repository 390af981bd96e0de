"""Plugins that change what they promise to leave alone are found in the first steps, by name and hook.

Modules:
    core/fastloop/checks/read_only.py
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastloop import Plugin, PluginError, hookimpl
from fastloop.evaluation_results import evaluating
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems


def observer(**hooks: Any) -> type[Plugin]:
    """A class of read-only plugins with these hooks."""
    marked = {name: hookimpl(function) for name, function in hooks.items()}
    return type("Watches", (Plugin,), {"name": "watches", "read_only": True, **marked})


def changer(**hooks: Any) -> Plugin:
    """A plugin with these hooks that makes no promise."""
    members: dict[str, Any] = {"name": "changes", "numerics": "changes-training"}
    for name, function in hooks.items():
        members[name] = function if hasattr(function, "fastloop_impl") else hookimpl(function)
    return type("Changes", (Plugin,), members)()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def third_time(function: Callable[..., None]) -> Any:
    """A hook that calls ``function`` in its third call."""

    def hook(self: Any, run: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            function(run)

    return hook


@torch.no_grad()
def decay(self: Any, run: Any) -> None:
    run.model[0].weight.mul_(0.999)


def decay_data(self: Any, run: Any) -> None:
    run.model[0].weight.data.mul_(0.999)


@torch.no_grad()
def pass_in_train_mode(self: Any, run: Any) -> None:
    run.model(torch.zeros(4, 8))


def clip(self: Any, run: Any) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-6)


def drop_gradient(self: Any, run: Any) -> None:
    run.model[2].bias.grad = None


def halve_rate(self: Any, run: Any) -> None:
    run.optimizer.param_groups[0]["lr"] /= 2


CHANGES: dict[str, tuple[str, Any, str]] = {
    "a weight": ("after_step", decay, "'0.weight'"),
    "a weight's data": ("before_step", decay_data, "'0.weight'"),
    "a weight in the third step": ("after_step", third_time(lambda run: decay(None, run)), "'0.weight'"),
    "a weight after an evaluation": ("after_evaluate", decay, "'0.weight'"),
    "a weight after training": ("after_fit", decay, "'0.weight'"),
    "statistics": ("after_step", pass_in_train_mode, "'1.running_mean'"),
    "gradients": ("before_optimizer_step", clip, "gradient '0.weight'"),
    "no gradient": ("after_backward", drop_gradient, "gradient '2.bias'"),
    "the learning rate": ("after_step", halve_rate, "rate"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_read_only_plugin_that_changes_the_training_is_refused(tiny_run, change):
    hook, function, changed = CHANGES[change]
    with expect_problem(f"read-only-changed 'watches' {hook} {changed} read_only", PluginError):
        tiny_run([observer(**{hook: function})()], model=normed(), epochs=1)


def test_a_plugin_that_is_not_read_only_may_change_the_training(tiny_run):
    plugins = [changer(after_step=decay, before_optimizer_step=clip)]
    assert tiny_run(plugins, model=normed(), epochs=1).summary["status"] == "completed"


def test_a_read_only_plugin_that_changes_the_training_can_be_disabled(tiny_run):
    summary = tiny_run([observer(before_step=decay_data)(on_error="disable")], model=normed(), epochs=1).summary
    assert summary["status"] == "completed"
    reason = summary["disabled"]["watches"]
    assert all(name in reason for name in ("before_step", "'0.weight'"))


DRAWS = {
    "torch": lambda self: torch.rand(1),
    "numpy": lambda self: np.random.rand(),
    "python": lambda self: random.random(),
}


@pytest.mark.parametrize("generator", DRAWS)
def test_a_read_only_plugin_that_draws_random_numbers_is_reported_once(tiny_run, caplog, generator):
    def draw(self: Any) -> None:
        DRAWS[generator](self)

    tiny_run([observer(before_step=draw, after_step=draw)()], epochs=1)
    assert len(find_problems(caplog, "draws-random-numbers")) == 1
    assert_problem(caplog, f"draws-random-numbers 'watches' before_step {generator}")


def test_an_observer_that_restores_what_it_changes_is_accepted(tiny_run, caplog):
    generator = torch.Generator()

    @torch.no_grad()
    def perturb(self: Any, run: Any, batches: Any) -> None:
        weight = run.model[0].weight
        before = weight.clone()
        weight.add_(torch.rand(weight.shape, generator=generator))
        with evaluating(run.model):
            run.model(batches[0].inputs[0])
        weight.copy_(before)

    def draw_where_states_are_restored(self: Any) -> None:
        torch.rand(1)

    hooks = {"before_step": perturb, "before_fit": draw_where_states_are_restored}
    watched = tiny_run([observer(**hooks, after_evaluate=draw_where_states_are_restored)()], model=normed(), epochs=1)
    assert watched.losses == tiny_run(model=normed(), epochs=1).losses
    assert [record for record in caplog.records if "watches" in record.getMessage()] == []


# -- eval mode ---------------------------------------------------------------------------------------------------------


def leave(self: Any, run: Any) -> None:
    run.model.eval()


def leave_after(self: Any, run: Any) -> Any:
    result = yield
    run.model.eval()
    return result


def leave_in_step(self: Any, run: Any, batches: Any) -> Any:
    run.model.eval()
    loss = run.accumulate_gradients(batches)
    run.apply_gradients(loss)
    return loss


LEFT: dict[str, tuple[str, Any]] = {
    hook: (hook, leave) for hook in ("before_fit", "before_epoch", "after_step", "before_evaluate", "after_evaluate")
}
LEFT |= {
    "a wrapper of evaluate": ("evaluate", hookimpl(wrapper=True)(leave_after)),
    "a wrapper of compute_loss": ("compute_loss", hookimpl(wrapper=True)(leave_after)),
    "train_step": ("train_step", leave_in_step),
    "the model of before_prepare": ("before_prepare", lambda self, model: model.eval() and None),
    "another model of before_prepare": ("before_prepare", lambda self: normed().eval()),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_model_that_is_left_in_eval_mode_is_refused(tiny_run, case):
    hook, function = LEFT[case]
    with expect_problem(f"wrong-result 'changes' {hook} eval", PluginError):
        tiny_run([changer(**{hook: function})], model=normed(), epochs=1)


def test_modules_in_eval_mode_and_a_model_after_training_are_accepted(tiny_run):
    frozen: list[bool] = []

    def freeze_statistics(self: Any, run: Any) -> None:
        run.model[1].eval()

    def observe(self: Any, run: Any) -> None:
        frozen.append(run.model[1].training)

    plugins = [changer(before_fit=freeze_statistics, after_step=observe, after_fit=leave)]
    assert tiny_run(plugins, model=normed(), epochs=1).summary["status"] == "completed"
    assert set(frozen) == {False}


# -- the summary -------------------------------------------------------------------------------------------------------


def test_write_summary_cannot_replace_what_others_wrote(tiny_run, caplog):
    def replace(self: Any, summary: dict[str, Any]) -> None:
        summary["steps"] = -1
        summary["validation"]["loss"] = 0.0
        summary["first"] = "replaced"
        del summary["device"]
        summary["changes"] = 7

    def add(self: Any, summary: dict[str, Any]) -> None:
        summary["first"] = "added"

    first = type("First", (Plugin,), {"name": "first", "write_summary": hookimpl(add)})()
    plain = tiny_run(epochs=1).summary
    summary = tiny_run([first, changer(write_summary=replace)], epochs=1).summary
    assert (summary["steps"], summary["device"]) == (plain["steps"], plain["device"])
    assert summary["validation"] == plain["validation"]
    assert (summary["first"], summary["changes"]) == ("added", 7)
    (message,) = [text for text in caplog.messages if "plugin 'changes': write_summary" in text]
    assert all(f"'{key}'" in message for key in ("steps", "validation", "first", "device"))


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "function"),
    [
        ("after_step", lambda run: None),
        ("after_step", lambda loss, run: None),
        ("before_step", lambda: None),
        ("compute_loss", lambda model, batch: None),
    ],
)
def test_a_hook_without_self_is_refused(hook, function):
    plugins = resolve(make_recipe({}), objects=[changer(**{hook: function})]).plugins
    with expect_problem(f"invalid-hook 'changes' {hook} 'self'", PluginError):
        _ = plugins.hooks


def test_a_static_hook_and_another_name_of_self_are_accepted(tiny_run):
    seen: list[int] = []

    class Changes(Plugin):
        name = "changes"

        @staticmethod
        @hookimpl
        def after_step(run: Any) -> None:
            seen.append(run.state.step)

        @hookimpl
        def before_step(this, run: Any) -> None:
            assert isinstance(this, Changes)

    tiny_run([Changes()], epochs=1)
    assert seen == list(range(1, 10))


@pytest.mark.parametrize("declaration", ["conflicts", "runs_before", "runs_after"])
def test_an_unknown_name_in_a_declaration_is_noted_once(caplog, declaration):
    caplog.set_level(logging.INFO, "fastloop")
    names: Any = {f"zero-bubble-{declaration}": "both schedule."}
    members = {"name": "changes", declaration: names if declaration == "conflicts" else tuple(names)}
    for _ in range(2):
        resolve(make_recipe({}), objects=[type("Changes", (Plugin,), members)()])
    (record,) = [record for record in caplog.records if "zero-bubble" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert f"plugin 'changes': {declaration} names 'zero-bubble-{declaration}'" in record.getMessage()
