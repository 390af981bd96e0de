"""optimizer-check: the optimizer steps the parameters that the model trains, or the error names the plugin to blame.

Modules:
    plugins/fastloop_plugins/guards/_parameters.py
    plugins/fastloop_plugins/guards/optimizer_check.py
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from flat_optimizers import Flat, Listed
from parameter_runs import Unfreezes
from torch import nn

from fastloop import Plugin, PluginError, Strategy, hookimpl
from fastloop.testing import assert_problem, expect_problem, find_problems, tiny_model
from fastloop.unstepped import by_module


def replace_weight(module: nn.Module) -> None:
    """Put a new Parameter with the same values in place of the weight."""
    module.weight = nn.Parameter(module.weight.detach().clone())


class Replaces(Plugin):
    """A conversion of layers that comes after the optimizer was built."""

    name = "replaces"

    @hookimpl
    def after_prepare(self, model: Any) -> None:
        replace_weight(model[0])


class ReplacesInPrepare(Strategy):
    """A strategy that converts layers in place."""

    name = "replaces-in-prepare"

    def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
        replace_weight(model[3])
        return model, optimizer


class Copies(Strategy):
    """A strategy that returns another model."""

    name = "copies"

    def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
        return copy.deepcopy(model), optimizer


class Around(Strategy):
    """Changes what the core's strategy prepared."""

    name = "around"

    def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
        model, optimizer = super().prepare(run, model, optimizer)
        replace_weight(model[0])
        return model, optimizer


class Adds(Plugin):
    """Adds a layer, with or without a place for it in the optimizer."""

    name = "adds"

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known

    @hookimpl
    def after_prepare(self, run: Any, model: Any) -> nn.Module:
        head = nn.Linear(3, 3).to(run.device)
        if self.known:
            run.optimizer.add_param_group({"params": list(head.parameters())})
        return nn.Sequential(model, head)


class Removes(Plugin):
    """Replaces a layer by one without parameters."""

    name = "removes"

    @hookimpl
    def after_prepare(self, model: Any) -> None:
        model[3] = nn.Identity()


class Innocent(Plugin):
    """Takes part in the same hooks and changes nothing."""

    name = "innocent"

    @hookimpl
    def after_prepare(self, model: Any) -> nn.Module:
        return nn.Sequential(model)


@pytest.mark.parametrize(
    ("plugin", "hook", "parameters"),
    [
        (Replaces(), "in after_prepare", ["0 (weight)", "0 (weight)"]),
        (ReplacesInPrepare(), "in prepare", ["3 (weight)", "3 (weight)"]),
        (Copies(), "in prepare", ["0 (weight, bias), 3 (weight, bias)", "0 (weight, bias), 3 (weight, bias)"]),
        (Around(), "in prepare", ["0 (weight)", "0 (weight)"]),
        (Adds(known=False), "in after_prepare", ["1 (weight, bias)"]),
        (Removes(), "in after_prepare", ["3 (weight, bias)"]),
    ],
    ids=lambda value: value.name if isinstance(value, Plugin) else "",
)
def test_a_plugin_that_takes_parameters_from_the_optimizer_is_refused_by_name(
    tiny_run, tmp_path, plugin, hook, parameters
):
    with expect_problem(f"parameters-replaced {plugin.name!r} {hook} before_prepare", PluginError) as error:
        tiny_run([plugin], output=tmp_path / "run")
    # the parameters that the optimizer lacks, and those that the model has no longer
    assert re.findall(r": (\d+ \([^.]*\))\.", str(error.value)) == parameters
    assert not (tmp_path / "run").exists(), "nothing was written or trained"


def test_all_plugins_that_implement_the_hook_are_named(tiny_run):
    with expect_problem("parameters-replaced 'replaces' 'innocent' after_prepare", PluginError):
        tiny_run([Replaces(), Innocent()])
    with expect_problem("parameters-replaced 'around'", PluginError):
        tiny_run([Innocent(), Around()])


class Spoils(Plugin):
    """Makes the loss of some steps NaN or infinite."""

    name = "spoils"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any, model: nn.Module) -> Any:
        output = yield
        if model.training and run.state.step in (2, 3):
            output.loss = output.loss * self.factor
        return output


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_one_warning(tiny_run, caplog, factor):
    tiny_run([Spoils(factor)], log_every=1)
    (warning,) = find_problems(caplog, "not-finite")
    assert warning.place == "step 3"
    assert str(factor) in warning.text


def test_nan_guard_reports_the_loss_alone(tiny_run, caplog):
    tiny_run([Spoils(float("nan")), {"nan-guard": {"action": "skip"}}], log_every=1)
    assert not any(problem.place == "step 3" for problem in find_problems(caplog, "not-finite"))


def test_without_the_plugin_nothing_is_compared(tiny_run, caplog):
    result = tiny_run([Replaces(), {"optimizer-check": False}])
    assert "optimizer-check" not in result.summary["plugins"]
    assert torch.equal(result.weights["0.weight"], tiny_model().state_dict()["0.weight"])
    assert warnings_of(caplog) == []


def test_parameters_that_the_optimizer_gets_too_are_trained(tiny_run):
    result = tiny_run([Adds(known=True), Innocent()])
    head = result.trainer.run.model[0][1]
    assert len(result.trainer.run.optimizer.state[head.weight]) > 0


class Builds(Plugin):
    """Its own choice of parameters."""

    name = "builds"

    def __init__(self, *extra: nn.Parameter, skip: int = 0) -> None:
        super().__init__()
        self.extra, self.skip = extra, skip

    @hookimpl
    def build_optimizer(self, run: Any, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*list(model.parameters())[self.skip :], *self.extra], lr=run.recipe.train.lr)


def warnings_of(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_build_optimizer_that_leaves_out_layers_is_one_warning(tiny_run, caplog):
    result = tiny_run([Builds(skip=2)])
    assert len(warnings_of(caplog)) == 1
    assert_problem(caplog, "parameters-left-out 'builds' build_optimizer 0")
    assert torch.equal(result.weights["0.weight"], tiny_model().state_dict()["0.weight"])


def test_an_optimizer_with_parameters_that_the_model_lacks_is_one_warning(tiny_run, caplog):
    tiny_run([Builds(nn.Parameter(torch.zeros(3)))])
    assert len(warnings_of(caplog)) == 1
    assert_problem(caplog, "foreign-parameters 'builds' 3")


def test_a_layer_left_out_on_purpose_does_not_excuse_one_that_is_replaced(tiny_run):
    with expect_problem("parameters-replaced 'replaces-in-prepare' 3", PluginError):
        tiny_run([Builds(skip=2), ReplacesInPrepare()])


@pytest.mark.parametrize(("hook", "trains"), [("before_prepare", False), ("before_fit", True)])
def test_a_layer_trains_later_if_the_optimizer_holds_it_and_is_a_warning_otherwise(tiny_run, caplog, hook, trains):
    result = tiny_run([Unfreezes(hook)])
    assert torch.equal(result.weights["0.weight"], tiny_model().state_dict()["0.weight"]) is not trains
    assert len(warnings_of(caplog)) == (0 if trains else 1)
    if not trains:
        assert_problem(caplog, "parameters-left-out step 0 (weight, bias) before_fit")


def test_frozen_parameters_need_no_optimizer(tiny_run, caplog):
    model = tiny_model()
    model[0].requires_grad_(False)
    tiny_run(model=model)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("kind", [Flat, Listed])
def test_an_optimizer_of_other_tensors_lists_the_parameters_that_it_steps(tiny_run, kind):
    class Flattens(Strategy):
        name = "strategy"

        def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
            return model, kind(optimizer, list(model.parameters()))

    if kind is Flat:
        with expect_problem("parameters-replaced 'strategy' model_parameters", PluginError):
            tiny_run([Flattens()])
    else:
        assert tiny_run([Flattens()], save_every=None).losses == pytest.approx(tiny_run().losses, rel=1e-5)


def test_a_message_names_five_modules():
    assert by_module(["a.weight", "a.bias", "scale"]) == "a (weight, bias), the model itself (scale)"
    assert by_module(f"{index}.weight" for index in range(9)).endswith("4 (weight) and 4 more modules")


@pytest.mark.parametrize("replaced", ["run.model", "run.optimizer", "3 (weight)"])
def test_what_before_fit_replaces_is_an_error_that_names_the_plugin(tiny_run, replaced):
    class Late(Plugin):
        name = "late"

        @hookimpl
        def before_fit(self, run: Any) -> None:
            if replaced == "run.model":
                run.model = copy.deepcopy(run.model)
            elif replaced == "run.optimizer":
                run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
            else:
                replace_weight(run.unwrap_model()[3])

    with expect_problem(f"parameters-replaced 'late' {replaced} before_fit", PluginError):
        tiny_run([Late()], epochs=1)
