"""The statistics of batch norm for other weights than those that they were collected with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastloop.evaluation_results import evaluating
from fastloop.runtime.random_states import preserve_random_states

if TYPE_CHECKING:
    from fastloop import Run


def norms_of(run: Run) -> list[Any]:
    """The batch norms of a model that keep statistics."""
    found = [module for module in run.unwrap_model().modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [module for module in found if module.track_running_stats]


@contextmanager
def estimated(run: Run, batches: int, restore: bool = True) -> Iterator[None]:
    """Estimate the statistics on batches of training samples, spread over the split and the same on each process, as
    their plain mean. Only batch norm is in train mode, so nothing else changes, and no random number is drawn.

    Args:
        restore: Whether to put the former statistics back at the end of the block.
    """
    norms = norms_of(run) if batches else []
    kept = [(module, {name: value.clone() for name, value in module.named_buffers()}) for module in norms]
    if norms:
        _estimate(run, norms, batches)
    try:
        yield
    finally:
        for module, buffers in kept if restore else ():
            for name, value in buffers.items():
                module.get_buffer(name).copy_(value)


def _estimate(run: Run, norms: list[Any], batches: int) -> None:
    loader, size = run.train_loader, run.train_loader.micro_batch_size
    reader: Any = loader.loader.dataset
    total = len(run.datasets["train"])
    count = min(batches * size, total)
    ids = [place * total // count for place in range(count)]
    momenta = [module.momentum for module in norms]
    with preserve_random_states(), torch.no_grad(), run.scalars.paused(), evaluating(run.model):
        for module in norms:
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
            module.train()
        for first in range(0, count, size):
            samples = list(reader.read(ids[first : first + size]))
            if len(samples) > 1:  # one sample has no variance
                ((batch,),) = run.to_device([[loader.loader.collate_fn(samples)]])
                run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
    for module, momentum in zip(norms, momenta, strict=True):
        module.momentum = momentum
