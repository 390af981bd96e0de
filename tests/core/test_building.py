"""A task that builds no dataset, no model or nothing to train: the error names the hook to implement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Plugin, PluginError, hookimpl
from fastloop.lifecycle import open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, make_recipe
from fastloop.testing import expect_problem

ROWS = [torch.ones(2)] * 4


class Task(Plugin):
    """Builds the given datasets and the given model."""

    name = "task"
    slot = "task"

    def __init__(self, datasets: Any = None, model: nn.Module | None = None) -> None:
        super().__init__()
        self.datasets = datasets
        self.model = model

    @hookimpl
    def build_datasets(self) -> Any:
        return self.datasets

    @hookimpl
    def build_model(self) -> nn.Module | None:
        return self.model


CASES = {
    "no split": (Task(), "no-dataset", "no split"),
    "no training split": (Task({"test": ROWS}), "no-dataset", "test"),
    "no model": (Task({"train": ROWS}), "no-model", "task."),
    "a model without parameters": (Task({"train": ROWS}, nn.Identity()), "nothing-trained", "0 parameters"),
    "a frozen model": (
        Task({"train": ROWS}, nn.Linear(2, 2).requires_grad_(False)),
        "nothing-trained",
        "2 parameters",
    ),
}


@pytest.mark.parametrize(("task", "code", "found"), CASES.values(), ids=CASES.keys())
def test_the_error_names_what_a_task_must_build(task, code, found):
    recipe = make_recipe({"train": {"device": "cpu", "max_steps": 1, "batch_size": 2}})
    with expect_problem(f"{code} recipe: {found}", PluginError) as refused, open_run(resolve(recipe, objects=[task])):
        pass
    assert refused.value.problem.remedy


def test_a_split_that_the_task_does_not_build_is_refused_with_those_that_it_builds():
    recipe = make_recipe({"train": {"device": "cpu"}})
    recipe.inference = Inference(None, "validation")
    task = Task({"test": ROWS}, nn.Linear(2, 2))
    with (
        expect_problem("unknown-split recipe: 'validation' test") as refused,
        open_run(resolve(recipe, objects=[task])),
    ):
        pass
    assert refused.value.problem.remedy
