"""Measure the time of a run by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


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
