"""Rank and world size from the environment, before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOOPBACK = "127.0.0.1"
"""The address on which the processes of one machine meet. No other machine reaches it."""


def _from_environment(*names: str) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)


_planned: ContextVar[int | None] = ContextVar("_planned", default=None)


@contextmanager
def planned(processes: int | None) -> Iterator[None]:
    """Let ``world_size`` return another number inside the block, to show how a recipe would run; None: do not."""
    token = _planned.set(processes)
    try:
        yield
    finally:
        _planned.reset(token)


def world_size() -> int:
    """Number of processes, from the variables of torchrun, accelerate, Intel MPI, Open MPI or MVAPICH that Accelerate
    reads."""
    processes = _planned.get()
    if processes is not None:
        return processes
    return _from_environment("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE") or 1


def rank() -> int:
    """Index of this process, from 0."""
    return _from_environment("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK") or 0
