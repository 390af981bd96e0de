"""The statistics of batch norm for other weights than those that they were collected with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fastloop.checks.batch_norm import batch_norms
from fastloop.evaluation_results import evaluating

if TYPE_CHECKING:
    from fastloop import Run


@contextmanager
def estimated(run: Run, batches: int, restore: bool = True) -> Iterator[None]:
    """Estimate the statistics on the first micro-batches of epoch 0, as their plain mean over all processes. Only batch
    norm is in train mode, so nothing else changes. Layers that training keeps in eval mode keep their statistics. Every
    process must call it.

    Args:
        batches: Micro-batches of each process; 0: keep the statistics.
        restore: Whether to put the former statistics back at the end of the block.
    """
    norms = [module for module in batch_norms(run) if batches and module.track_running_stats and module.training]
    kept = [(buffer, buffer.clone()) for module in norms for buffer in module.buffers()]
    if norms:
        _estimate(run, norms, batches)
    try:
        yield
    finally:
        if restore:
            for buffer, value in kept:
                buffer.copy_(value)


def _estimate(run: Run, norms: list[BatchNorm], batches: int) -> None:
    momenta = [module.momentum for module in norms]
    with (
        closing(run.training_batches()) as training_batches,
        torch.no_grad(),
        run.scalars.paused(),
        evaluating(run.model),
    ):
        for module in norms:
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
            module.train()
        for batch in islice(training_batches, batches):
            run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
    for module, momentum in zip(norms, momenta, strict=True):
        module.momentum = momentum
        for name in ("running_mean", "running_var"):
            run.processes.all_reduce_mean(module.get_buffer(name))
