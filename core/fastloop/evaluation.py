"""The parts of an evaluation: eval mode, and results that stay on the device until the last batch, so that no batch waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

    from fastloop.state import Output

HELD = 64 * 2**20
"""Bytes of predictions and targets that wait for the metrics' next update: one update for most evaluations, without a large model's logits
filling the device."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode. Afterwards each module is in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class EvaluationResults:
    """Losses and metrics of an evaluation on this process.

    The metrics are updated with the predictions of many batches together, and with those of the last batch before they are computed. By
    torchmetrics' contract the division into updates does not matter. Predictions that are not tensors, or have another shape after the
    first dimension than those that wait, start an update of their own.

    Args:
        check: Called with each metric's name and value before they are read; raises an error for a value that is not one number.
    """

    def __init__(self, metrics: MetricCollection | None, check: Callable[[str, Any], None] | None = None) -> None:
        self.metrics, self.check = metrics, check
        self.losses: list[Tensor] = []
        self.weights: list[int] = []
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.bytes = 0
        if metrics is not None:
            metrics.reset()

    def add(self, output: Output, weight: int, samples: int) -> None:
        """Take over what a batch gave. One without samples counts in no metric: its process only computes along."""
        self.losses.append(output.loss.detach())
        self.weights.append(weight)
        if self.metrics is None or output.predictions is None or not samples:
            return
        pair = (output.predictions, output.targets)
        if self.waiting and _kind(*pair) != _kind(*self.waiting[0]):
            self._update()
        if _kind(*pair) is None:
            self.metrics.update(*pair)
            return
        assert output.targets is not None
        self.waiting.append((output.predictions, output.targets))
        self.bytes += output.predictions.nbytes + output.targets.nbytes
        if self.bytes >= HELD:
            self._update()

    def _update(self) -> None:
        if self.waiting and self.metrics is not None:
            predictions, targets = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
            self.metrics.update(predictions, targets)
        self.waiting, self.bytes = [], 0

    def read(self) -> tuple[float, int, dict[str, float]]:
        """The sum of each batch's loss times its weight, the sum of the weights, and the metrics, which torchmetrics exchanges between
        processes. The host reads the device once; a metric may read it for its own computation."""
        self._update()
        values: dict[str, Any] = {} if self.metrics is None else dict(self.metrics.compute())
        if self.check is not None:
            for name, value in values.items():
                self.check(str(name), value)
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        wide = torch.float32 if losses.device.type == "mps" else torch.float64  # which holds the others exactly
        beside = [name for name, value in values.items() if isinstance(value, Tensor) and (value.dim(), value.device) == (0, losses.device)]
        numbers = torch.cat([losses.to(wide), *(values[name].to(wide)[None] for name in beside)]).tolist()
        total = 0.0
        for loss, weight in zip(numbers, self.weights, strict=False):
            total += loss * weight
        values |= dict(zip(beside, numbers[len(losses) :], strict=True))
        return total, sum(self.weights), {str(name): float(value) for name, value in values.items()}


def _kind(predictions: Any, targets: Any) -> tuple[Any, ...] | None:
    """What two batches must share so that they can be put together; None: they cannot."""
    if not all(isinstance(value, Tensor) and value.dim() for value in (predictions, targets)):
        return None
    return tuple((value.shape[1:], value.dtype, value.device) for value in (predictions, targets))
