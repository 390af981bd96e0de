"""The plugin ``freeze``: against a plain loop of torch, with lora, and refused where it would freeze nothing or all.

Modules:
    plugins/fastloop_plugins/training/_patterns.py
    plugins/fastloop_plugins/training/freeze.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interrupted_runs import Case, check_interrupted
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch.optim import AdamW
from torch.utils.data import TensorDataset
from training_runs import execute

from fastloop import Problem, RecipeError, Trainer
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import TEXTS, expect_problem, write_texts


def frozen(model, *parts):
    """An optimizer of a plain loop for the parameters whose names do not begin with one of the parts."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(parts))
    return AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=LR, weight_decay=0.0)


def test_the_rest_trains_as_in_a_plain_loop():
    ours = trained(plugins=[{"freeze": {"match": ["embed.*", "blocks.0.*"]}}])
    assert_same(ours, torch_loop(lambda model: frozen(model, "embed.", "blocks.0.")))


def test_frozen_parameters_are_in_no_optimizer_and_the_run_resumes():
    plugins = [{"freeze": {"match": "embed.*"}}]
    assert sum(len(group["params"]) for group in make_run(plugins=plugins).optimizer.param_groups) == 10
    check_interrupted(Case(plugins=plugins), "limit", 8)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        (["embed.*", "haed.*"], "no-match plugins.freeze.match 'haed 'head"),
        ("*", "nothing-trained plugins.freeze.match"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(match, message):
    with expect_problem(message, RecipeError):
        make_run(plugins=[{"freeze": {"match": match}}])
    assert not Path("out").exists()


def text_run(*plugins):
    """A built run of a tiny BERT, which another run has trained for a step."""
    write_texts(Path.cwd())
    first = {**TEXTS, "train": {"device": "cpu", "max_steps": 1}, "output": "first"}
    execute(build(resolve(make_recipe(first))))
    train = {"device": "cpu", "epochs": 1, "lr": 0.01}
    recipe = {**TEXTS, "model": {"name": "first/model"}, "train": train, "plugins": list(plugins)}
    return build(resolve(make_recipe(recipe)))


def test_with_lora_patterns_name_the_layers_of_the_model():
    pytest.importorskip("peft")
    run = text_run({"freeze": {"match": ["bert.encoder.layer.0.*", "classifier.*"]}}, {"lora": {"merge": False}})
    names = [name for name, parameter in run.unwrap_model().named_parameters() if parameter.requires_grad]
    assert names
    assert all(".layer.1." in name and ".lora_" in name for name in names)
    before = {name: parameter.detach().clone() for name, parameter in run.unwrap_model().named_parameters()}
    execute(run)
    assert {
        name for name, parameter in run.unwrap_model().named_parameters() if not torch.equal(parameter, before[name])
    } == set(names)


@pytest.mark.slow
def test_with_lora_nothing_may_be_left():
    pytest.importorskip("peft")
    with expect_problem("nothing-trained freeze.match", RecipeError):
        text_run("lora", {"freeze": {"match": ["classifier.*", "*.lora_*"]}})


def batch_norm_run(match):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    plugins = [{"freeze": {"match": match}}, {"log": False}, {"progress": False}]
    loss = torch.nn.functional.cross_entropy
    Trainer(model, data, loss=loss, plugins=plugins, batch_size=8, epochs=1, device="cpu", output="run").fit()
    return model


def test_statistics_of_a_frozen_batch_norm_are_mentioned(caplog):
    batch_norm_run("0.*")
    assert "frozen-batch-norm" not in codes_of(caplog)
    model = batch_norm_run(["0.*", "1.*"])
    assert not torch.equal(model[1].running_mean, torch.zeros(4))
    assert "frozen-batch-norm" in codes_of(caplog)


def codes_of(caplog):
    """The codes of the logged problems."""
    return [record.msg.code for record in caplog.records if isinstance(record.msg, Problem)]
