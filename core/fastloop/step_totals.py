"""The sums over the micro-batches of an optimizer step, on all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fastloop.state import Batch, BatchTotals

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop.distributed.processes import Processes


class StepTotals:
    """Starts to sum over the micro-batches of a step. ``get`` waits for the sums, so that the exchange between
    processes overlaps a forward pass.

    Args:
        batches: The micro-batches of this process.
        processes: The processes that share the samples of a step.
    """

    __slots__ = ("_read_sums", "_totals", "batches")

    def __init__(self, batches: list[Batch], processes: Processes) -> None:
        self.batches = batches
        own = add_up(batches)
        self._totals: BatchTotals | None = own
        self._read_sums: Callable[[], Tensor] | None = None
        if processes.world_size > 1:
            self._totals = None
            self._read_sums = processes.start_all_reduce_sum(torch.tensor(own, dtype=torch.float64))

    def get(self) -> BatchTotals:
        """The sums over all processes."""
        if self._totals is None:
            assert self._read_sums is not None
            self._totals = BatchTotals.read(self._read_sums())
        return self._totals


def add_up(batches: list[Batch]) -> BatchTotals:
    """The sums over the micro-batches of this process."""
    weight = 0.0
    samples = tokens = drawn = unreadable = 0
    for batch in batches:
        weight += batch.loss_weight
        samples += batch.samples
        tokens += batch.tokens
        drawn += batch.drawn + len(batch.unreadable)
        unreadable += len(batch.unreadable)
    return BatchTotals(weight, samples, tokens, drawn, unreadable)
