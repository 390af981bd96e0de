"""Means of rewards, as metrics of evaluations and as scalars of the training."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

NAMES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")


class Rewards(Metric):
    """The means of all rows that an evaluation computes, see ``means``."""

    full_state_update = False
    totals: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("totals", torch.zeros(2, 3), dist_reduce_fx="sum")

    def update(self, rewards: Tensor, targets: Tensor) -> None:
        """Add rewards, see ``sums``. ``targets`` are the same."""
        self.totals += sums(rewards)

    def compute(self) -> dict[str, Tensor]:
        """The means, 0-dim each."""
        return means(self.totals)


def sums(rewards: Tensor) -> Tensor:
    """The sums of both rewards and of correct orders, and the counts of their rows, (2, 3) float32.

    Args:
        rewards: Those of the chosen and the rejected completion, (rows, 2). NaN: the row has no such completion.
    """
    correct = torch.where(rewards.isnan().any(1), torch.nan, (rewards[:, 0] > rewards[:, 1]).float())
    found = torch.column_stack([rewards.detach().float(), correct])
    return torch.stack([found.nansum(0), (~found.isnan()).sum(0)])


def means(totals: Tensor) -> dict[str, Tensor]:
    """``rewards/chosen``, ``rewards/rejected`` and, of rows with both, ``rewards/accuracies``: the share whose chosen
    completion has the larger reward. ``rewards/margins`` is the difference of the first two.

    Means without a row are left out.
    """
    found = {name: total / count for name, total, count in zip(NAMES, *totals, strict=True) if count}
    if len(found.keys() & {*NAMES[:2]}) == 2:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found
