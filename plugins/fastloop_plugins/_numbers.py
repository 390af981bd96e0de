"""What the plugin ``finite`` reads and writes, and which losses it takes for spikes."""

from __future__ import annotations

import json
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run

NORMAL = 1.4826
"""The median distance from the median, times this, is the standard deviation of normally distributed numbers."""
LEAST = 20
"""Losses that must be known before one can be a spike."""


class Spikes:
    """The last ``window`` losses. A spike is more than ``far`` standard deviations above their median; no single loss moves either far."""

    def __init__(self, window: int, far: float) -> None:
        self.losses: deque[float] = deque(maxlen=window)
        self.far = far

    def usual(self, loss: float) -> float | None:
        """Takes a loss in; returns the median before it when it is a spike."""
        spike = None
        if len(self.losses) >= LEAST:
            median = statistics.median(self.losses)
            spread = NORMAL * statistics.median(abs(value - median) for value in self.losses)
            if loss > median + self.far * max(spread, 0.01 * abs(median)):
                spike = median
        self.losses.append(loss)
        return spike


def read(numbers: list[Tensor]) -> list[list[float]]:
    """Tensors of several steps on the host, together: the device is waited for once."""
    import torch

    found: list[list[float]] = torch.stack(numbers).tolist() if numbers else []
    return found


def write(run: Run, number: int, place: list[int], **found: Any) -> None:
    """A line of ``bad_batches.jsonl`` about a step, with its sample ids, or positions in an iterable dataset.

    Args:
        number: As in metrics.jsonl: the first step is 1.
        place: The step's epoch, from 0, and how many samples of it came before.
    """
    if not run.is_main:
        return
    sampler, (epoch, start) = run.train_loader.sampler, place
    end = start + run.recipe.train.batch_size
    ids = list(range(start, end)) if sampler is None else sampler.order()[start:end]
    with (run.folder / "bad_batches.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "epoch": epoch, **found, "ids": ids}) + "\n")
