"""The metrics that the tasks declare are those that evaluations compute."""

import pytest
import torch

from fastloop_preference.dpo import DPO
from fastloop_preference.kto import KTO
from fastloop_preference.metrics import means, sums
from fastloop_preference.reward_model import RewardModel

PAIRS = torch.tensor([[2.0, 1.0], [0.5, 1.5]])
LABELLED = torch.tensor([[2.0, torch.nan], [torch.nan, 1.5]])


@pytest.mark.parametrize(("task", "rewards"), [(DPO, PAIRS), (RewardModel, PAIRS), (KTO, LABELLED)])
def test_every_metric_of_an_evaluation_is_declared(task, rewards):
    assert task.adds_metrics.keys() == means(sums(rewards)).keys()
    better = {name for name, mode in task.adds_metrics.items() if mode == "max"}
    assert better == {"rewards/margins", "rewards/accuracies"} & task.adds_metrics.keys()
