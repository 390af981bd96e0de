"""The random states that training draws from: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Every random state that training draws from, on this process."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """The inverse of ``random_states``. Call it before the first batch is fetched."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def preserve_random_states(wanted: bool = True) -> Iterator[None]:
    """Restore the random states at the end, if ``wanted``. A resumed run repeats such a part, and it must not count twice."""
    states = random_states() if wanted else None
    yield
    if states is not None:
        restore_random_states(states)
