"""``train.optimizer``: names, references and arguments, against a plain loop of torch.

Modules:
    core/fastloop/optimizers/named.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import Case, check_interrupted
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch.optim import SGD, AdamW, Rprop
from training_runs import execute

from fastloop import CheckpointError, Plugin, PluginError, RecipeError, hookimpl
from fastloop.testing import expect_problem

CASES: dict[str, tuple[Any, Any]] = {
    "name": ("SGD", lambda weights: SGD(weights, lr=LR)),
    "arguments": (
        {"name": "SGD", "momentum": 0.9, "nesterov": True},
        lambda weights: SGD(weights, lr=LR, momentum=0.9, nesterov=True),
    ),
    "list for a tuple": (
        {"name": "AdamW", "betas": [0.8, 0.9]},
        lambda weights: AdamW(weights, lr=LR, betas=(0.8, 0.9), weight_decay=0),
    ),
    "no weight decay": ("Rprop", lambda weights: Rprop(weights, lr=LR)),
    "class": ({"name": "code.py:Tripled", "factor": 2.0}, lambda weights: SGD(weights, lr=2.0 * LR)),
    "function": ("code.py:sgd", lambda weights: SGD(weights, lr=LR, momentum=0.5)),
    "function with arguments": (
        {"name": "code.py:sgd", "momentum": 0.8},
        lambda weights: SGD(weights, lr=LR, momentum=0.8),
    ),
    "package": ({"name": "torch.optim:SGD", "momentum": 0.9}, lambda weights: SGD(weights, lr=LR, momentum=0.9)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_equals_the_one_of_a_plain_loop(case):
    recipe, make = CASES[case]
    assert_same(trained(optimizer=recipe), torch_loop(lambda model: make(model.parameters())))


def test_an_override_changes_one_argument():
    ours = trained("train.optimizer.momentum=0.8", optimizer={"name": "SGD", "momentum": 0.9})
    assert_same(ours, torch_loop(lambda model: SGD(model.parameters(), lr=LR, momentum=0.8)))


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown argument": (
        {"name": "SGD", "momentun": 0.9},
        {},
        "unknown-argument optimizer.momentun: 'momentum' SGD(params, lr=0.001, momentum=0, damp",
    ),
    "unknown argument of a function": (
        {"name": "code.py:sgd", "nesterov": True},
        {},
        "unknown-argument optimizer.nesterov: sgd(params, lr, mom",
    ),
    "no name": (
        {"momentum": 0.9},
        {},
        "invalid-value train: {'momentum': 0.9} {name: SGD",
    ),
    "lr": ({"name": "SGD", "lr": 0.9}, {}, "set-twice train.optimizer.lr: 0.05 train.lr=0.9"),
    "weight decay": (
        "Rprop",
        {"weight_decay": 0.1},
        "unknown-argument train.optimizer.weight_decay: Rprop(",
    ),
    "invalid value": (
        {"name": "SGD", "momentum": -1},
        {},
        "call-failed train.optimizer: SGD 'momentum': -1",
    ),
    "no optimizer": (
        "code.py:returns_nothing",
        {},
        "wrong-result optimizer: code.py:returns_nothing NoneType torch.optim.Optimizer",
    ),
    "not callable": ("code.py:number", {}, "wrong-type train.optimizer: code.py:number torch.optim.Optimizer"),
    "another class": ("code.py:Net", {}, "wrong-type train.optimizer: code.py:Net torch.optim.Optimizer"),
    "unknown name": ({"name": "SDG"}, {}, "unknown-optimizer train.optimizer: torch.optim 'SDG' 'SGD'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_key_and_writes_nothing(case):
    optimizer, train, expected = ERRORS[case]
    with expect_problem(expected, RecipeError):
        make_run(optimizer=optimizer, **train)
    assert not Path("out").exists()


def test_unknown_arguments_are_found_before_the_data_is_read():
    with expect_problem("unknown-argument train.optimizer.momentun: 'momentum'", RecipeError):
        make_run("data.module=code.py:number", optimizer={"name": "SGD", "momentun": 0.9})


def test_plugins_add_arguments_and_cannot_change_those_of_the_recipe():
    run = make_run(
        optimizer={"name": "SGD", "momentum": 0.9}, plugins=[{"fused-optimizer": {"implementation": "foreach"}}]
    )
    assert (run.optimizer.param_groups[0]["momentum"], run.optimizer.param_groups[0]["foreach"]) == (0.9, True)
    with expect_problem("conflicting-values 'train.optimizer' 'fused-optimizer' optimizer['fused']", PluginError):
        make_run(optimizer={"name": "SGD", "fused": False}, plugins=["fused-optimizer"])


def test_a_run_resumes_with_it_and_is_refused_with_another_argument():
    chosen = {"name": "SGD", "momentum": 0.9}
    check_interrupted(Case(train={"optimizer": chosen}), "limit", 5)
    with expect_problem("resume-differs train.optimizer {'momentum' 0.9 'name' 'SGD'} 0.8", CheckpointError):
        execute(make_run("output=cut", optimizer={"name": "SGD", "momentum": 0.8}, resume=Path("cut")))


class Switched(SGD):
    """Has modes, as the optimizers of the package schedulefree: evaluation reads an average of the weights."""

    is_training = True

    def train(self) -> None:
        """Put the weights for training into the model."""
        self.is_training = True

    def eval(self) -> None:
        """Put the weights for evaluation into the model."""
        self.is_training = False


class BuildsSwitched(Plugin):
    name = "builds-switched"
    numerics = "changes-training"

    @hookimpl
    def build_optimizer(self, model):
        return Switched(model.parameters(), lr=LR)


class BuildsDict(BuildsSwitched):
    @hookimpl
    def build_optimizer(self, model):
        return {"all": Switched(model.parameters(), lr=LR)}


class BuildsWrapped(BuildsSwitched):
    @hookimpl
    def build_optimizer(self, run, model):
        return run.accelerator.prepare_optimizer(Switched(model.parameters(), lr=LR))


class SwitchesModes(BuildsSwitched):
    """Calls the methods itself."""

    switches_optimizer_modes = True

    def __init__(self) -> None:
        super().__init__()
        self.in_evaluations: list[bool] = []

    @hookimpl(wrapper=True)
    def evaluate(self, run):
        run.optimizer.eval()
        self.in_evaluations.append(run.optimizer.is_training)
        metrics = yield
        run.optimizer.train()
        return metrics


class BuildsWrappedSgd(BuildsSwitched):
    @hookimpl
    def build_optimizer(self, run, model):
        return run.accelerator.prepare_optimizer(SGD(model.parameters(), lr=LR))


@pytest.mark.parametrize("plugin", [BuildsSwitched, BuildsDict, BuildsWrapped])
def test_an_optimizer_with_modes_is_refused(tiny_run, plugin):
    with expect_problem("unsupported-optimizer Switched train() eval() ema switches_optimizer_modes", PluginError):
        tiny_run([plugin()])


def test_a_plugin_may_switch_the_modes_itself(tiny_run):
    plugin = SwitchesModes()
    tiny_run([plugin])
    assert plugin.in_evaluations
    assert not any(plugin.in_evaluations)


def test_an_optimizer_that_accelerate_wrapped_has_no_modes(tiny_run):
    wrapped = tiny_run([BuildsWrappedSgd()])
    plain = tiny_run(optimizer="SGD", lr=LR, weight_decay=0)
    assert wrapped.losses == plain.losses
