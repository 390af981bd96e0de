"""Parameter groups, frozen parameters, Muon and class weights on two processes, under each strategy, against one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from recipe_runs import make_run, trained
from training_runs import execute

from fastloop import RecipeError

pytestmark = pytest.mark.slow

GROUPS: dict[str, Any] = {
    "weight_decay": 0.1,
    "decay_biases_and_norms": False,
    "layer_lr_decay": 0.5,
    "parameter_groups": [{"match": "head.*", "lr": 0.01}],
    "plugins": [{"freeze": {"match": "embed.bias"}}, {"lr-scheduler": {"schedule": "polynomial", "warmup": 2}}],
    "optimizer": {"name": "SGD", "momentum": 0.9},
    "loss": {"name": "cross_entropy", "class_weights": "balanced"},
}
MUON: dict[str, Any] = {"optimizer": "Muon", "weight_decay": 0.1, "decay_biases_and_norms": False, "max_steps": 1}
"""One step changes elements by about 0.01. Muon computes in bfloat16, so more steps amplify its rounding."""
SETTINGS = {"groups": GROUPS, "muon": MUON}
STRATEGIES = ["ddp", "fsdp", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]
CASES = [
    (strategy, name)
    for strategy in STRATEGIES
    for name in SETTINGS
    if (strategy, name) in (("ddp", "muon"), (strategy, "groups"))
]


def weights(strategy: str, name: str) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """The full weights after training, and rate and decay of each group."""
    settings = SETTINGS[name]
    run = make_run(**{**settings, "plugins": [*settings.get("plugins", []), strategy]}, micro_batch_size=2)
    execute(run)
    return run.full_state_dict(), [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_two_processes_train_as_one(processes, tmp_path, strategy, name):
    alone = trained(**SETTINGS[name])
    state, groups = processes(2, weights, strategy, name, folder=tmp_path)[0].result
    assert len(set(groups)) > 1
    for key, tensor in alone.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=3e-4 if name == "muon" else 1e-5)


def refusal() -> str:
    """The error of Muon under fsdp."""
    with pytest.raises(RecipeError) as caught:
        make_run(optimizer="Muon", plugins=["fsdp"])
    return str(caught.value)


def test_muon_refuses_sharded_weights(processes, tmp_path):
    for ended in processes(2, refusal, folder=tmp_path):
        assert "train.optimizer: Muon on sharded weights gives other updates. Use ddp instead of fsdp." in ended.result
