"""Means of rewards, lengths and others: of a training step, over all processes, and of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric


@dataclass
class Mean:
    """A sum of values and their number. NaN are left out."""

    total: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of some values."""
        known = [value for value in values if not math.isnan(value)]
        return cls(math.fsum(known), len(known))

    def value(self) -> float:
        """The mean; NaN without a value."""
        return self.total / self.count if self.count else math.nan


def join_means(parts: Sequence[Mapping[str, Mean]]) -> dict[str, Mean]:
    """The means over all processes, by name. A process may lack a name."""
    joined: dict[str, Mean] = {}
    for part in parts:
        for name, mean in part.items():
            known = joined.setdefault(name, Mean())
            known.total += mean.total
            known.count += mean.count
    return joined


class GroupMeans(Metric):
    """The means over the prompts of an evaluation, of several values each.

    Args:
        names: The name of each value.
    """

    full_state_update = False
    totals: Tensor

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.add_state("totals", torch.zeros(2, len(names), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, targets: Tensor) -> None:
        """Add values, (prompts, names) float32; NaN: none."""
        wide = values.to(self.totals.dtype)
        self.totals += torch.stack([wide.nansum(0), (~wide.isnan()).sum(0)])

    def compute(self) -> dict[str, Tensor]:
        sums, counts = self.totals
        return dict(zip(self.names, sums / counts, strict=True))
