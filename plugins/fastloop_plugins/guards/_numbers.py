"""Helpers of ``nan-guard``: read and write its numbers, make a step change nothing, and detect loss spikes."""

from __future__ import annotations

import json
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

from fastloop import FastloopError
from fastloop.runtime.files import no_follow

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run

NORMAL = 1.4826
"""The median distance from the median, times this, is the standard deviation of normally distributed numbers."""
MIN_WINDOW = 20
"""Losses that must be known before one can be a spike."""


class NotFinite(FastloopError):
    """A step's loss or gradients are NaN or infinite. ``place``: its epoch, and how many samples of it came before."""

    code = "not-finite"

    def __init__(self, message: str, place: list[int]) -> None:
        super().__init__(message)
        self.place = place


class Spikes:
    """The last ``window`` losses. A spike is more than ``threshold`` standard deviations above their median."""

    def __init__(self, window: int, threshold: float) -> None:
        self.losses: deque[float] = deque(maxlen=window)
        self.threshold = threshold

    def add(self, loss: float) -> float | None:
        """Add a loss. Returns the median of the losses before it if it is a spike."""
        spike = None
        if len(self.losses) >= MIN_WINDOW:
            median = statistics.median(self.losses)
            spread = NORMAL * statistics.median([abs(value - median) for value in self.losses])
            if loss > median + self.threshold * max(spread, 0.01 * abs(median)):
                spike = median
        self.losses.append(loss)
        return spike


def loss_and_norm(run: Run, loss: Tensor) -> Tensor:
    """A step's loss and the norm of its gradients, on the device; 0 with loss scaling, which finds its scale by
    overflows."""
    import torch

    norm = run.gradient_norm() if run.accelerator.scaler is None else torch.zeros_like(loss)
    return torch.stack([loss.float(), norm.float()])


def read(numbers: list[Tensor]) -> list[list[float]]:
    """The tensors of several steps as numbers. Waits for the device once."""
    import torch

    if not numbers:
        return []
    values: list[list[float]] = torch.stack(numbers).tolist()
    return values


def discard_step(run: Run, bad: Tensor, buffers: list[tuple[Tensor, Tensor]], by_itself: bool) -> None:
    """Make the next optimizer step change nothing, if it is ``bad``. With loss scaling, the scaler does that.

    Args:
        bad: 0-dim bool on the device; the host waits for it only where it must.
        buffers: The model's buffers, each with its value before the step.
        by_itself: Whether the optimizer can skip a step on the device.
    """
    import torch

    for buffer, before in buffers:
        buffer.copy_(torch.where(bad, before, buffer))
    if by_itself:
        optimizer: Any = run.optimizer
        optimizer.found_inf = bad.float()  # a fused optimizer reads it
    elif run.accelerator.scaler is None and bad:
        run.optimizer.zero_grad()  # weights without gradients do not change


def write(run: Run, number: int, place: list[int], **found: Any) -> None:
    """A line of ``bad_batches.jsonl`` about a step, with its sample ids, or positions in an iterable dataset.

    Args:
        number: As in metrics.jsonl: the first step is 1.
        place: The step's epoch, from 0, and how many samples of it came before.
    """
    if not run.is_main:
        return
    epoch, start = place
    end = start + run.recipe.train.batch_size
    sampler = run.train_loader.sampler
    ids = list(range(start, end)) if sampler is None else list(sampler.order()[start:end])
    with open(run.folder / "bad_batches.jsonl", "a", opener=no_follow) as file:
        file.write(json.dumps({"step": number, "epoch": epoch, **found, "ids": ids}) + "\n")
