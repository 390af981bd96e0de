"""``train.parameter_groups``, ``layer_lr_decay`` and ``decay_biases_and_norms``, against groups in a raw torch loop.

Modules:
    plugins/fastloop_plugins/training/parameter_groups.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_interrupted
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch import nn
from torch.optim import SGD, AdamW
from training_runs import execute

from fastloop import CheckpointError, RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.training.parameter_groups import biases_and_norms


def grouped(model: nn.Module, chosen: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One group for each parameter. ``chosen``: start or end of a name -> arguments; the later one wins."""
    groups = []
    for name, parameter in model.named_parameters():
        arguments: dict[str, Any] = {}
        for part, values in chosen.items():
            if name.startswith(part) or name.endswith(part):
                arguments |= values
        groups.append({"params": [parameter], **arguments})
    return groups


def test_patterns_set_arguments_and_the_later_one_wins():
    ours = trained(
        weight_decay=0.1,
        parameter_groups=[
            {"match": "head.*", "lr": 0.01},
            {"match": ["*.bias", "blocks.*.1.*"], "weight_decay": 0, "betas": [0.5, 0.9]},
            {"match": "head.bias", "lr": 0.2},
        ],
    )
    chosen = {
        "head.": {"lr": 0.01},
        ".bias": {"weight_decay": 0, "betas": (0.5, 0.9)},
        "1.weight": {"weight_decay": 0, "betas": (0.5, 0.9)},
        "head.bias": {"lr": 0.2},
    }
    assert_same(ours, torch_loop(lambda model: AdamW(grouped(model, chosen), lr=LR, weight_decay=0.1)))


def test_biases_and_norms_do_not_decay():
    ours = trained(weight_decay=0.3, decay_biases_and_norms=False)
    chosen = {".bias": {"weight_decay": 0.0}, "1.weight": {"weight_decay": 0.0}}
    assert_same(ours, torch_loop(lambda model: AdamW(grouped(model, chosen), lr=LR, weight_decay=0.3)))


class NormHead(nn.Linear):
    """A matrix of a class whose name contains Norm, such as that of Baichuan 2."""


class Scale(nn.Module):
    """A norm whose class has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))


class RootNorm(Scale):
    """The same norm, with a usual name."""


def test_biases_are_found_by_name_and_norms_by_type_and_dimension():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "gru": nn.GRU(8, 8),
            "head": NormHead(8, 8, bias=False),
            "layer": nn.LayerNorm(8),
            "rms": nn.RMSNorm(8),
            "group": nn.GroupNorm(2, 8),
            "batch": nn.BatchNorm2d(8),
            "root": RootNorm(),
            "scale": Scale(),
            "relative_attention_bias": nn.Embedding(4, 2),
            "embedding": nn.Embedding(4, 2),
        }
    )
    spared = {id(parameter) for parameter in biases_and_norms(model)}
    decayed = {name for name, parameter in model.named_parameters() if id(parameter) not in spared}
    assert decayed == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "gru.weight_ih_l0",
        "gru.weight_hh_l0",
        "head.weight",
        "scale.gain",
        "embedding.weight",
    }


ARCHITECTURES: dict[str, tuple[str, set[str]]] = {
    "bert": ("AutoModelForSequenceClassification", set()),
    "distilbert": ("AutoModelForSequenceClassification", set()),
    "deberta-v2": ("AutoModelForTokenClassification", set()),
    "mpnet": ("AutoModelForSequenceClassification", set()),
    "t5": ("AutoModelForSeq2SeqLM", set()),
    "bart": ("AutoModelForSeq2SeqLM", set()),
    "gpt2": ("AutoModelForCausalLM", set()),
    "llama": ("AutoModelForCausalLM", set()),
    "vit": ("AutoModelForImageClassification", set()),
    "resnet": ("AutoModelForImageClassification", {"BatchNorm2d"}),
    "mamba": ("AutoModelForCausalLM", {"MambaRMSNorm"}),
}
"""Architecture -> its Auto class, and the classes of norms that transformers' `Trainer` decays, because their names do
not match its patterns."""


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_parameters_without_decay_are_those_of_the_trainer_of_transformers(kind):
    import transformers

    auto, norms = ARCHITECTURES[kind]
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind))
    names = {name for name, _ in model.named_parameters()}
    theirs = names - {*transformers.Trainer.get_decay_parameter_names(None, model)}
    spared = {id(parameter) for parameter in biases_and_norms(model)}
    ours = {name for name, parameter in model.named_parameters() if id(parameter) in spared}
    assert theirs <= ours
    assert {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in ours - theirs} == norms


def test_lower_layers_learn_more_slowly():
    ours = trained(layer_lr_decay=0.5, optimizer={"name": "SGD", "momentum": 0.9})
    chosen = {"embed": {"lr": LR * 0.5**3}, "blocks.0": {"lr": LR * 0.5**2}, "blocks.1": {"lr": LR * 0.5}}
    assert_same(ours, torch_loop(lambda model: SGD(grouped(model, chosen), lr=LR, momentum=0.9)))


def test_a_rate_by_name_is_not_decayed_by_layers():
    run = make_run(layer_lr_decay=0.5, parameter_groups=[{"match": "blocks.0.*", "lr": 0.01}])
    rates = {id(parameter): group["lr"] for group in run.optimizer.param_groups for parameter in group["params"]}
    found = {name.rpartition(".")[0]: rates[id(parameter)] for name, parameter in run.model.named_parameters()}
    assert found == {
        "embed": LR / 8,
        "blocks.0.0": 0.01,
        "blocks.0.1": 0.01,
        "blocks.1.0": LR / 2,
        "blocks.1.1": LR / 2,
        "head": LR,
    }
    assert run.optimizer.param_groups[0]["lr"] == LR, "train/lr logs the first group"


def test_optimizers_of_a_dict_are_regrouped():
    run = make_run(
        optimizer="Muon",
        weight_decay=0.1,
        decay_biases_and_norms=False,
        parameter_groups=[{"match": "head.weight", "lr": 0.01}],
    )
    found = {
        (group["optimizer"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in run.optimizer.param_groups
    }
    assert found == {("muon", LR, 0.1, 3), ("muon", 0.01, 0.1, 1), ("adamw", LR, 0.0, 8)}


def test_a_schedule_multiplies_the_rate_of_each_group():
    groups = [{"match": "head.*", "lr": 0.01}]
    run = make_run(parameter_groups=groups, plugins=[{"lr-scheduler": {"schedule": "linear"}}], max_steps=4)
    run.optimizer.step()
    run.scheduler.step()
    assert [group["lr"] for group in run.optimizer.param_groups] == [LR * 0.75, 0.01 * 0.75]


def test_a_resumed_run_cannot_change_its_groups():
    chosen: dict[str, Any] = {"parameter_groups": [{"match": "head.*", "lr": 0.01}]}
    execute(make_run("output=cut", "train.max_steps=5", save_every=5, **chosen))
    with expect_problem("resume-differs train.parameter_groups 0.01 0.02", CheckpointError):
        execute(
            make_run(
                "output=cut", resume=Path("cut"), **{**chosen, "parameter_groups": [{"match": "head.*", "lr": 0.02}]}
            )
        )
    with expect_problem("resume-differs train.layer_lr_decay None 0.5", CheckpointError):
        execute(make_run("output=cut", resume=Path("cut"), layer_lr_decay=0.5, **chosen))


def test_a_resumed_run_has_the_weights_of_a_whole_one():
    groups = [{"match": "head.*", "lr": 0.01, "betas": [0.5, 0.9]}]
    check_interrupted(Case(train={"parameter_groups": groups, "layer_lr_decay": 0.5}), "SIGTERM", 5)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"parameter_groups": [{"match": "haed.*", "lr": 0.1}]},
            "no-match parameter_groups[0] 'haed 'head",
        ),
        ({"parameter_groups": [{"match": "head.*"}]}, "missing-value parameter_groups[0]"),
        ({"parameter_groups": [{"lr": 0.1}]}, "missing-value parameter_groups[0].match"),
        ({"parameter_groups": [{"match": "head.*", "lr": -1}]}, "invalid-value parameter_groups[0].lr -1"),
        ({"parameter_groups": [{"match": "head.*", "momentum": 0.9}]}, "unknown-argument AdamW 'momentum'"),
        (
            {"parameter_groups": [{"match": "head.*", "lr_": 0.9}]},
            "unknown-argument AdamW 'lr_' 'lr'",
        ),
        ({"layer_lr_decay": 1.5}, "invalid-value train.layer_lr_decay 1.5"),
    ],
)
def test_errors_name_the_key(train, message):
    with expect_problem(message, RecipeError):
        make_run(**train)


def test_layers_need_repeated_blocks(tiny_run):
    with expect_problem("unsupported-model train.layer_lr_decay", RecipeError):
        tiny_run(layer_lr_decay=0.5)


def test_without_its_keys_it_changes_nothing():
    assert_same(trained(plugins=["parameter-groups"]), trained())
