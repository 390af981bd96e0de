"""A function of numpy arrays as a metric, such as one of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class FunctionMetric(Metric):
    """Calls a function once an evaluation, with the predictions and targets of the whole split.

    The arrays are those of all processes: predictions (samples, ...), targets (samples, ...). bfloat16, which numpy
    lacks, becomes float32.

    Args:
        function: ``function(predictions, targets)`` returns a number.
    """

    full_state_update = False
    predictions: list[Tensor]
    targets: list[Tensor]

    def __init__(self, function: Callable[[Any, Any], SupportsFloat]) -> None:
        super().__init__()
        self.function = function
        self.add_state("predictions", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.predictions.append(predictions)
        self.targets.append(targets)

    def compute(self) -> float:
        return float(self.function(as_array(self.predictions), as_array(self.targets)))


def as_array(batches: list[Tensor] | Tensor) -> Any:
    """The batches as one numpy array."""
    values = dim_zero_cat(batches).detach().cpu()
    return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
