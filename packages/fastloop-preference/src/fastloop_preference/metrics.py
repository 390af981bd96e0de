"""Means of rewards, as metrics of evaluations and as scalars of the training."""

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
        self.totals += sums(rewards)

    def compute(self) -> dict[str, Tensor]:
        return means(self.totals)


def sums(rewards: Tensor) -> Tensor:
    """The sums of both rewards and of correct orders, and the counts of their rows, (2, 3) float32. ``rewards`` are
    (rows, 2), of the chosen completion first, and NaN without such a completion."""
    correct = torch.where(rewards.isnan().any(1), torch.nan, (rewards[:, 0] > rewards[:, 1]).float())
    columns = torch.column_stack([rewards.detach().float(), correct])
    return torch.stack([columns.nansum(0), (~columns.isnan()).sum(0)])


def means(totals: Tensor) -> dict[str, Tensor]:
    """The means of ``sums`` that have a row. ``rewards/accuracies`` is the share of pairs in the right order, and
    ``rewards/margins`` the difference of the other two."""
    means = {name: total / count for name, total, count in zip(NAMES, *totals, strict=True) if count}
    if len(means.keys() & {*NAMES[:2]}) == 2:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means
