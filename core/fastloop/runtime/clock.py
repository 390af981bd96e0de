"""Measure the time and memory of a run."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from time import monotonic, perf_counter

import psutil
import torch

from fastloop.runtime import platform_support


class Clock:
    """Seconds by phase. Phases nest, and an outer phase does not include inner ones. Each change of phase waits for the
    device.

    with clock("train"):
        ...
        with clock("evaluate"):
            ...
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._synchronize = synchronize
        self._phases: list[str] = []
        self._since = perf_counter()

    def _lap(self) -> None:
        self._synchronize()
        now = perf_counter()
        if self._phases:
            self.seconds[self._phases[-1]] += now - self._since
        self._since = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._lap()
        self._phases.append(phase)
        try:
            yield
        finally:
            self._lap()
            self._phases.pop()

    def read(self, phase: str) -> float:
        """Seconds of a phase until now, without waiting for the device."""
        running = perf_counter() - self._since if self._phases[-1:] == [phase] else 0.0
        return self.seconds[phase] + running


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated on CUDA, resident on other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else platform_support.peak_resident_memory()


def memory_held(device: torch.device) -> int:
    """Memory in bytes: reserved by the allocator on CUDA, resident on other devices. Read once a second, as it takes a
    step's time."""
    return _memory_held(device, os.getpid(), int(monotonic()))


@lru_cache(maxsize=1)
def _memory_held(device: torch.device, pid: int, second: int) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else int(_process(pid).memory_info().rss)


@cache
def _process(pid: int) -> psutil.Process:
    """Cached, because creating one takes as long as a small step."""
    return psutil.Process(pid)
