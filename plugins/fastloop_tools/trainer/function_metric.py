"""A function of numpy arrays as a metric, such as one of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fastloop_plugins.tasks.shared.broadcasts import check_shapes


class FunctionMetric(Metric):
    """Calls a function once an evaluation, with the predictions and targets of the whole split.

    The arrays are those of all processes: predictions (samples, ...), targets (samples, ...). bfloat16, which numpy
    lacks, becomes float32.

    Args:
        function: ``function(predictions, targets)`` returns a number.

    Raises:
        UsageError: The function broadcasts predictions of shape (N, 1) with targets of shape (N,).
    """

    full_state_update = False
    read_by_compute = ("function",)
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
        predictions = as_array(self.predictions)
        targets = as_array(self.targets)
        if predictions.ndim == targets.ndim:
            return float(self.function(predictions, targets))
        return float(self.function(predictions.view(Predictions), targets.view(Targets)))


def as_array(batches: list[Tensor] | Tensor) -> Any:
    """The batches as one numpy array."""
    values = dim_zero_cat(batches).detach().cpu()
    return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()


class WatchedArray(np.ndarray):
    """An array that raises an error if numpy broadcasts predictions with targets to a larger shape.

    Computed arrays keep their class: ``predictions * 2`` are predictions. An array of both is an ordinary one.
    """

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
        predictions = [value for value in inputs if isinstance(value, Predictions)]
        targets = [value for value in inputs if isinstance(value, Targets)]
        if method == "__call__" and ufunc.signature is None:  # with a signature: matmul and others, without broadcasts
            for prediction in predictions:
                for target in targets:
                    check_shapes(prediction.shape, target.shape)
        if "out" in keywords:
            keywords["out"] = tuple(map(as_plain, keywords["out"]))
        result = getattr(ufunc, method)(*map(as_plain, inputs), **keywords)
        has_both = bool(predictions and targets)
        if has_both or not isinstance(result, np.ndarray):
            return result
        return result.view(Predictions if predictions else Targets)


def as_plain(value: Any) -> Any:
    """A watched array as an ordinary one; other values as they are."""
    return value.view(np.ndarray) if isinstance(value, WatchedArray) else value


class Predictions(WatchedArray):
    """The predictions of a split."""


class Targets(WatchedArray):
    """The targets of a split."""
