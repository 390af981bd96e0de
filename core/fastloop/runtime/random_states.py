"""Seed, save and restore the random states of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
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


Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""A generator that an object may keep for itself."""

DEPTH = 5
"""Attributes of attributes that ``find_generators`` visits: a dataset in a ``Subset``, its list of transforms, and
their generators."""

LARGEST = 100
"""Elements of a list or dict that ``find_generators`` visits at most: longer ones hold samples."""

CLOSED = (type, ModuleType, FunctionType, torch.Tensor, np.ndarray, str, bytes)
"""Types into which ``find_generators`` does not look: modules lead to the generators that all code shares."""


def find_generators(value: Any, depth: int = DEPTH) -> list[Generator]:
    """The generators of random numbers that an object keeps in its attributes, lists and dicts, each once."""
    generators: list[Generator] = []
    known: set[int] = set()

    def visit(part: Any, left: int) -> None:
        if id(part) in known:
            return
        known.add(id(part))
        if isinstance(part, Generator):
            generators.append(part)
            return
        if left == 0 or isinstance(part, CLOSED):
            return
        inner = list(getattr(part, "__dict__", {}).values())
        if isinstance(part, dict) and len(part) <= LARGEST:
            inner += part.values()
        elif isinstance(part, list | tuple) and len(part) <= LARGEST:
            inner += part
        for one in inner:
            visit(one, left - 1)

    visit(value, depth)
    return generators


def seed_generators(generators: list[Generator], seed: int) -> None:
    """Seed generators in place: each with another seed."""
    for index, generator in enumerate(generators):
        own = (seed + index) % 2**32
        if isinstance(generator, np.random.Generator):
            fresh: Any = type(generator.bit_generator)
            generator.bit_generator.state = fresh(own).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        else:
            generator.seed(own)


@contextmanager
def preserve_random_states(enabled: bool = True) -> Iterator[None]:
    """Restore the random states at the end of the block. For code that a resumed run repeats."""
    states = random_states() if enabled else None
    try:
        yield
    finally:
        if states is not None:
            restore_random_states(states)
