"""Seed, save and restore the random states of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch


def cpu_random_states() -> dict[str, Any]:
    """The random states of this process's CPU generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def random_states(own: Sequence[Generator] = ()) -> dict[str, Any]:
    """The random states of this process, with that of its current CUDA device. A resumed run may find fewer devices.

    Args:
        own: Generators that the data keep for themselves; see ``Loaders.own_generators``.
    """
    states = cpu_random_states()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if own:
        states["own"] = read_generators(own)
    return states


def restore_random_states(states: Mapping[str, Any], own: Sequence[Generator] = ()) -> None:
    """Restore the result of ``random_states`` or ``cpu_random_states``.

    Args:
        own: As in ``random_states``. If the states are of another number of generators, these stay as they are.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    own_states = states.get("own", [])
    if len(own_states) == len(own):
        restore_generators(own, own_states)


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

CLOSED = (type, ModuleType, torch.Tensor, np.ndarray, str, bytes)
"""Types into which ``find_generators`` does not look: modules lead to the generators that all code shares."""


def find_generators(value: Any, depth: int = DEPTH) -> list[Generator]:
    """The generators of random numbers that an object keeps in its attributes, lists and dicts, each once. Those of a
    function are in its closure, and those of a method in its object."""
    generators: list[Generator] = []
    known: set[int] = set()

    def visit(part: Any, left: int) -> None:
        if id(part) in known:
            return
        known.add(id(part))
        if isinstance(part, Generator):
            generators.append(part)
            return
        if left == 0 or isinstance(part, CLOSED) or _copies_generators(part):
            return
        inner = list(getattr(part, "__dict__", {}).values())
        if isinstance(part, dict) and len(part) <= LARGEST:
            inner += part.values()
        elif isinstance(part, list | tuple) and len(part) <= LARGEST:
            inner += part
        elif isinstance(part, partial):
            inner += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, MethodType):
            inner.append(part.__self__)
        elif isinstance(part, FunctionType):
            inner += _values_of_closure(part)
        for one in inner:
            visit(one, left - 1)

    visit(value, depth)
    return generators


def _copies_generators(part: Any) -> bool:
    """Whether an object draws from copies of its generators: a data set of ``datasets`` keeps the states that the user
    gave, and the epoch decides the order."""
    return type(part).__module__.startswith("datasets.")


def _values_of_closure(function: FunctionType) -> list[Any]:
    """The values of outer variables that a function reads. One that is not set yet has none."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def read_generators(generators: Sequence[Generator]) -> list[Any]:
    """The state of each generator, as ``checkpoint.pack`` takes it."""
    states: list[Any] = []
    for generator in generators:
        if isinstance(generator, np.random.Generator):
            states.append(dict(generator.bit_generator.state))
        elif isinstance(generator, random.Random):
            states.append(generator.getstate())
        else:
            states.append(generator.get_state())
    return states


def restore_generators(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Restore the result of ``read_generators``."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


def seed_generators(generators: Sequence[Generator], seed: int) -> None:
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
def preserve_random_states(enabled: bool = True, own: Sequence[Generator] = ()) -> Iterator[None]:
    """Restore the random states at the end of the block. For code that a resumed run repeats.

    Args:
        own: As in ``random_states``, for a block that reads data.
    """
    states = random_states(own) if enabled else None
    try:
        yield
    finally:
        if states is not None:
            restore_random_states(states, own)
