"""Seed, save and restore the random states of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def cpu_random_states() -> dict[str, Any]:
    """The random states of this process's CPU generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def random_states() -> dict[str, Any]:
    """The random states of this process, with that of its current CUDA device. A resumed run may find fewer devices."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return cpu_random_states() | ({"cuda": torch.cuda.get_rng_state()} if on_cuda else {})


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the result of ``random_states`` or ``cpu_random_states``."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_all(seed: int) -> None:
    """Seed the CPU generators, which datasets use. Generators of other devices belong to training and keep their
    states."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_random_states(enabled: bool = True) -> Iterator[None]:
    """Restore the random states at the end of the block. For code that a resumed run repeats."""
    states = random_states() if enabled else None
    try:
        yield
    finally:
        if states is not None:
            restore_random_states(states)
