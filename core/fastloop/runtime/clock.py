"""Where a run's seconds and bytes went."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter

import psutil
import torch

from fastloop.runtime import platform_support


class Clock:
    """Seconds by what they were spent on. Spans nest, and the inner one's time is not the outer's; the device is waited for at each change.

    with clock("train"):
        ...
        with clock("evaluate"):
            ...
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._synchronize = synchronize
        self._spans: list[str] = []
        self._since = perf_counter()

    def _lap(self) -> None:
        self._synchronize()
        now = perf_counter()
        if self._spans:
            self.seconds[self._spans[-1]] += now - self._since
        self._since = now

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        self._lap()
        self._spans.append(what)
        try:
            yield
        finally:
            self._lap()
            self._spans.pop()

    def read(self, what: str) -> float:
        """Seconds up to now, without waiting for the device."""
        running = perf_counter() - self._since if self._spans[-1:] == [what] else 0.0
        return self.seconds[what] + running


def peak_memory(device: torch.device) -> int:
    """Largest bytes in use so far: allocated on an accelerator, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return platform_support.peak_resident_memory()


def memory_held(device: torch.device) -> int:
    """Bytes held now: reserved by the allocator on CUDA, where the line should be flat; resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(_process(os.getpid()).memory_info().rss)


@cache
def _process(pid: int) -> psutil.Process:
    """Kept: making one takes as long as a small step."""
    return psutil.Process(pid)
