"""A ``DataLoader`` without workers that reads the next batches in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastloop.data.datasets import Collate, MapReader

AHEAD = 4
"""Batches that the thread reads ahead. A step with gradient accumulation takes several at once."""


class ReadAheadLoader(DataLoader[Any]):
    """Reads, collates and pins the next batches in one thread, for ``Settings.thread_loader_class``.

    Only if reading draws no random numbers: see ``is_deterministic``. Otherwise it is a plain ``DataLoader``. The
    thread is at most ``AHEAD`` batches ahead, and it lives until ``close()``. Its error is raised where the caller asks
    for that batch.

    The page-locked memory is that of torch's allocator. It reuses the memory of a batch when all copies from it are
    complete.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.thread: ThreadPoolExecutor | None = None
        reader = self.dataset
        collate = self.collate_fn
        assert isinstance(collate, Collate)
        self.reads_ahead = isinstance(reader, MapReader) and is_deterministic(reader.dataset, collate.collator)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # any iterator
        """The batches of a pass."""
        batches = super().__iter__()
        if not self.reads_ahead:
            yield from batches
            return
        batch = next(batches, None)  # draws the order of the pass: a user's sampler changes global random states
        reading: deque[Future[Any]] = deque()
        try:
            while batch is not None:
                while len(reading) < AHEAD:
                    reading.append(self._start_thread().submit(next, batches, None))
                yield batch
                batch = reading.popleft().result()
        finally:
            for future in reading:
                future.cancel()

    def _start_thread(self) -> ThreadPoolExecutor:
        """The thread, which is started once. It has the current device, to which page-locked memory belongs."""
        if self.thread is None:
            set_device: Callable[[], None] | None = None
            if torch.accelerator.is_available():
                set_device = partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
            self.thread = ThreadPoolExecutor(1, "fastloop-batches", set_device)
        return self.thread

    def close(self) -> None:
        """End the thread, after the batch that it reads."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)
            self.thread = None


def is_deterministic(dataset: Any, collator: Any) -> bool:
    """Whether both promise that a batch follows from its sample ids; see ``DatasetProtocol.deterministic``."""
    return getattr(dataset, "deterministic", False) and getattr(collator, "deterministic", False)
