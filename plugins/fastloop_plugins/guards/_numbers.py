"""Helpers of ``nan-guard``: read and write its numbers, restore buffers, and detect loss spikes."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import FastloopError
from fastloop.runtime import json_text
from fastloop.runtime.files import no_follow

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

NORMAL = 1.4826
"""The median distance from the median, times this, is the standard deviation of normally distributed numbers."""
SMALLEST_SPREAD = 0.01
"""Smallest standard deviation to assume, as a fraction of the median: losses that hardly differ make no spikes."""
MIN_WINDOW = 20
"""Losses that must be known before one can be a spike."""


@dataclass(frozen=True)
class StepStart:
    """A step, and the place in the data where it begins.

    Attributes:
        number: The step, as in metrics.jsonl: the first one is 1.
        epoch: Its epoch, from 0.
        samples: How many samples of the epoch came before the step.
        drawn: Samples of the step that this process reads.
    """

    number: int
    epoch: int
    samples: int
    drawn: int


@dataclass(frozen=True)
class UncheckedStep:
    """A step whose numbers the host has not read yet.

    Attributes:
        start: The step.
        loss_and_norm: Shape (2,), on the device: the loss and the norm of the gradients.
    """

    start: StepStart
    loss_and_norm: Tensor


@dataclass(frozen=True)
class SavedBuffer:
    """A buffer of the model, such as a mean of batch norm, and a copy of its values before a step."""

    buffer: Tensor
    before: Tensor


class NotFinite(FastloopError):
    """A step's loss or gradients are NaN or infinite.

    Attributes:
        start: The step.
    """

    code = "not-finite"

    def __init__(self, message: str, start: StepStart) -> None:
        super().__init__(message)
        self.start = start


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
            smallest_spread = SMALLEST_SPREAD * abs(median)
            if loss > median + self.threshold * max(spread, smallest_spread):
                spike = median
        self.losses.append(loss)
        return spike


def loss_and_norm(run: Run, loss: Tensor) -> Tensor:
    """A step's loss and the norm of its gradients, shape (2,), on the device.

    With loss scaling the norm is 0: gradients that overflow are how the scaler finds its scale, and no failure.
    """
    import torch

    norm = run.gradient_norm() if run.accelerator.scaler is None else torch.zeros_like(loss)
    return torch.stack([loss.float(), norm.float()])


def read_numbers(numbers: list[Tensor]) -> list[list[float]]:
    """The tensors of several steps as numbers. Waits for the device once."""
    import torch

    if not numbers:
        return []
    values: list[list[float]] = torch.stack(numbers).tolist()
    return values


def copy_buffers(model: nn.Module) -> list[SavedBuffer]:
    """Copy the buffers that a forward may change, such as the statistics of batch norm."""
    return [SavedBuffer(buffer, buffer.clone()) for buffer in model.buffers()]


def restore_buffers(buffers: list[SavedBuffer]) -> None:
    """Undo what the forward of a step changed in buffers."""
    for saved in buffers:
        saved.buffer.copy_(saved.before)


def write_record(run: Run, start: StepStart, **facts: Any) -> None:
    """Append a line about a step to ``bad_batches.jsonl``, on the main process. All processes must call it.

    The line has the step's sample ids, or its positions in an iterable dataset.

    Args:
        facts: Further entries of the line, such as ``what`` and ``loss``.
    """
    drawn: list[int] = run.loaders.processes.all_gather_object(start.drawn)
    if not run.is_main:
        return
    end = start.samples + sum(drawn)  # the last step of an epoch may have fewer than train.batch_size
    sampler = run.train_loader.sampler
    if sampler is None:
        ids = list(range(start.samples, end))
    else:
        ids = list(sampler.order()[start.samples : end])
    line = json_text.dumps({"step": start.number, "epoch": start.epoch, **facts, "ids": ids})
    with open(run.folder / "bad_batches.jsonl", "a", opener=no_follow) as file:
        file.write(line + "\n")
