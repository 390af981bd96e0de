"""Seconds by phase: phases nest, and each change of phase waits for the device.

Modules:
    core/fastloop/runtime/clock.py
"""

from __future__ import annotations

import pytest

from fastloop.runtime import clock
from fastloop.runtime.clock import Clock


class Watch:
    """A clock of the machine that tests move on.

    Attributes:
        seconds: The time.
        waits: How often the device was waited for.
    """

    def __init__(self) -> None:
        self.seconds = 100.0
        self.waits = 0

    def now(self) -> float:
        return self.seconds

    def wait(self) -> None:
        """Wait for a device that needs half a second for the work that was given to it."""
        self.waits += 1
        self.seconds += 0.5


@pytest.fixture
def watch(monkeypatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(clock, "perf_counter", watch.now)
    return watch


def test_an_outer_phase_does_not_include_inner_ones(watch):
    timed = Clock(watch.wait)
    with timed("train"):
        watch.seconds += 10
        with timed("evaluate"):
            watch.seconds += 3
        watch.seconds += 20
    assert timed.seconds == {"train": 31.0, "evaluate": 3.5}, "each change of phase waits half a second"
    assert watch.waits == 4


def test_a_phase_that_fails_ends(watch):
    timed = Clock(watch.wait)

    def fail() -> None:
        with timed("save"):
            watch.seconds += 2
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    watch.seconds += 50
    with timed("train"):
        watch.seconds += 1
    assert timed.seconds == {"save": 2.5, "train": 1.5}


def test_reading_does_not_wait(watch):
    timed = Clock(watch.wait)
    with timed("train"):
        watch.seconds += 4
        waits = watch.waits
        assert timed.read("train") == 4.0
        assert timed.read("evaluate") == 0.0
        assert watch.waits == waits
    assert timed.read("train") == 4.5
