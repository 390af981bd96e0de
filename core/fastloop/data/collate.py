"""Collate the samples of a micro-batch into a ``Batch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from fastloop.data.datasets import Filler, Numbered, Samples
from fastloop.state import Batch


class Collate:
    """Calls the task's collator and fills in the fields of ``Batch``."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> Batch:
        is_filler = bool(samples) and isinstance(samples[0], Filler)
        ids, last, unreadable = (
            (samples.ids, samples.is_last_micro_batch, samples.unreadable) if isinstance(samples, Samples) else ((), False, ())
        )
        if samples and isinstance(samples[0], Numbered):
            ids, samples = tuple(number for number, _ in samples), [sample for _, sample in samples]
        result = self.collator(samples[0] if is_filler else samples)
        batch = result if isinstance(result, Batch) else Batch(result)
        batch.samples, batch.ids, batch.is_last_micro_batch, batch.unreadable = len(samples), ids, last, unreadable
        batch.loss_weight = batch.loss_weight or batch.samples
        if is_filler:
            batch.samples = batch.loss_weight = batch.tokens = 0
        info = get_worker_info()
        batch.worker = info.id if info is not None else -1
        return batch
