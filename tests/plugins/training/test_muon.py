"""``train.optimizer: Muon``: Muon for 2-D weights and AdamW for the rest, against a plain loop of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch.optim import AdamW, Muon

from fastloop import RecipeError
from fastloop.lifecycle import execute


def both(model, adamw=(), **arguments):
    """The two optimizers of a plain loop."""
    named = dict(model.named_parameters())
    matrices = [weight for name, weight in named.items() if weight.ndim == 2 and name not in adamw]
    rest = [weight for name, weight in named.items() if weight.ndim != 2 or name in adamw]
    shared = {"lr": LR, "weight_decay": 0.1}
    return [Muon(matrices, adjust_lr_fn="match_rms_adamw", **shared, **arguments), AdamW(rest, **shared)]


def test_it_equals_two_optimizers_in_a_plain_loop():
    assert_same(trained(optimizer="Muon", weight_decay=0.1), torch_loop(both))


def test_arguments_are_muons_and_patterns_keep_adamw():
    ours = trained(optimizer={"name": "Muon", "momentum": 0.8}, weight_decay=0.1, plugins=[{"muon-optimizer": {"adamw": ["head.*"]}}])
    assert_same(ours, torch_loop(lambda model: both(model, ["head.weight"], momentum=0.8)))


def test_it_resumes_with_the_same_weights():
    whole = trained(optimizer="Muon")
    execute(make_run("output=cut", optimizer="Muon", max_steps=5, save_every=5))
    rest = make_run("output=cut", optimizer="Muon", resume=Path("cut"))
    execute(rest)
    assert_same(rest.unwrap_model().state_dict(), whole)


def test_another_optimizer_is_left_alone():
    assert_same(trained(optimizer="AdamW", plugins=["muon-optimizer"]), trained(optimizer="AdamW"))


@pytest.mark.parametrize(
    ("optimizer", "patterns", "message"),
    [
        ({"name": "Muon", "betas": [0.9, 0.9]}, [], r"train\.optimizer\.betas: no such argument.*Muon\(params, lr="),
        ({"name": "Muon", "momentum": 0.9, "adjust_lr_fn": "x"}, [], r"Muon was called with .*"),
        ("Muon", ["haed.*"], r"plugins\.muon-optimizer\.adamw: no parameter matches 'haed\.\*'\. Did you mean 'head\.\*'\?"),
        ("Muon", ["*"], r"no 2-D weight is left for Muon"),
    ],
)
def test_errors_name_the_key(optimizer, patterns, message):
    with pytest.raises(RecipeError, match=message):
        make_run(optimizer=optimizer, plugins=[{"muon-optimizer": {"adamw": patterns}}])
