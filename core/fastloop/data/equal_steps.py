"""As many steps on each process, for a dataset that shards itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fastloop.errors import DataError
from fastloop.state import Batch

if TYPE_CHECKING:
    from fastloop.data.loader import Loader
    from fastloop.distributed.processes import Processes


def equal_steps(steps: Iterable[list[Batch]], loader: Loader, processes: Processes) -> Iterable[list[Batch]]:
    """Steps that all processes take together, until the largest share has ended.

    A process whose share ends before those of others repeats its last micro-batch, without samples and with a weight of
    0: it is no part of the loss, and the others wait for its gradients. Shares of 10 and 5 samples, in micro-batches of
    4, give these samples::

        step         1    2    3
        process 0    4    4    2
        process 1    4    1    0

    Args:
        steps: The micro-batches of each step of this process. They are returned if all processes have the same number.
        loader: The loader that they come from.

    Raises:
        DataError: A process has no sample, and others have some; raised on every process.
    """
    if processes.world_size == 1 or loader.in_step:
        return steps
    return _fill_up(steps, processes, loader.dataset)


def _fill_up(steps: Iterable[list[Batch]], processes: Processes, dataset: object) -> Iterator[list[Batch]]:
    own_steps = iter(steps)
    filler: Batch | None = None
    is_first_step = True
    while True:
        batches = next(own_steps, [])
        counts = torch.zeros(processes.world_size, dtype=torch.int64)
        counts[processes.rank] = len(batches)
        counts = processes.all_reduce_sum(counts)
        most = int(counts.max())
        if most == 0:
            return
        if is_first_step and int(counts.min()) == 0:
            raise DataError(
                f"{type(dataset).__name__} shards itself, and has no sample for process {int(counts.argmin())}.",
                code="empty-split",
                remedy="Let it yield at least one on each process.",
            )
        is_first_step = False
        if batches:
            filler = replace(
                batches[-1], loss_weight=0, samples=0, tokens=0, ids=(), unreadable=(), stream_digest="", drawn=0
            )
        missing = most - len(batches)
        if missing > 0:
            assert filler is not None
            batches = batches + [replace(filler) for _ in range(missing)]
        yield batches
