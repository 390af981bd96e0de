"""Seed, save and restore the random states of Python, NumPy and torch."""

from __future__ import annotations

import dis
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch


def cpu_random_states() -> dict[str, Any]:
    """The random states of this process's CPU generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def random_states(own: Sequence[RandomGenerator] = ()) -> dict[str, Any]:
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


def restore_random_states(states: Mapping[str, Any], own: Sequence[RandomGenerator] = ()) -> None:
    """Restore the result of ``random_states`` or ``cpu_random_states``.

    Args:
        own: As in ``random_states``. Generators of another number or kind than those of the states stay as they are.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    own_states = states.get("own", [])
    if are_states_of(own, own_states):
        restore_generators(own, own_states)


def seed_all(seed: int) -> None:
    """Seed the CPU generators, which datasets use. Generators of other devices belong to training and keep their
    states."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


RandomGenerator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""A generator of random numbers that an object may keep for itself."""

DEPTH = 5
"""Attributes of attributes that ``find_generators`` visits: a dataset in a ``Subset``, its list of transforms, and
their generators."""

LARGEST = 100
"""Elements of a list or dict that ``find_generators`` visits at most: longer ones hold samples."""

VISITS = 10_000
"""Objects that ``find_generators`` visits at most, which takes less than 0.1 s: a dataset may hold samples in many
short lists."""

CLOSED = (type, ModuleType, torch.Tensor, np.ndarray, str, bytes)
"""Types into which ``find_generators`` does not look: modules lead to the generators that all code shares."""


def find_generators(*values: Any) -> list[RandomGenerator]:
    """The generators of random numbers that objects keep for themselves, each once.

    They are in attributes, slots, lists, tuples and dicts. Those of a function are in its closure, its defaults and the
    global variables that it names, and those of a method in its object. ``DEPTH``, ``LARGEST`` and ``VISITS`` limit the
    search in each object, which visits near attributes first. Generators that all code of the process shares are left
    out, and so are those without a state, such as ``random.SystemRandom``.
    """
    generators: dict[int, RandomGenerator] = {}
    for value in values:
        for generator in _search(value):
            generators[id(generator)] = generator
    return list(generators.values())


def _search(value: Any) -> list[RandomGenerator]:
    """The generators that one object keeps, those near to it first."""
    generators: list[RandomGenerator] = []
    shared = _shared_generators()
    known: set[int] = set()
    level = [value]
    for _ in range(DEPTH + 1):
        next_level: list[Any] = []
        for part in level:
            if id(part) in known:
                continue
            if len(known) == VISITS:
                return generators
            known.add(id(part))
            if isinstance(part, RandomGenerator):
                if id(part) not in shared and _has_state(part):
                    generators.append(part)
            elif not isinstance(part, CLOSED) and not _copies_generators(part):
                next_level += _parts_of(part)
        level = next_level
    return generators


def _shared_generators() -> set[int]:
    """The ids of the generators that all code of this process shares. An accelerator has some once it is in use."""
    shared = [random._inst, np.random.mtrand._rand, torch.default_generator, *torch.cuda.default_generators]
    shared += getattr(torch.xpu, "default_generators", ())
    return {id(generator) for generator in shared}


def _has_state(generator: RandomGenerator) -> bool:
    """Whether the state of a generator can be read. Numbers of the operating system have none."""
    try:
        read_generators([generator])
    except NotImplementedError:
        return False
    return True


def _copies_generators(part: Any) -> bool:
    """Whether an object draws from copies of its generators: a data set of ``datasets`` keeps the states that the user
    gave, and the epoch decides the order."""
    return type(part).__module__.startswith("datasets.")


def _parts_of(part: Any) -> list[Any]:
    """The values that an object holds directly."""
    parts = list(getattr(part, "__dict__", {}).values())
    parts += _values_of_slots(part)
    if isinstance(part, dict) and len(part) <= LARGEST:
        parts += part.values()
    elif isinstance(part, list | tuple) and len(part) <= LARGEST:
        parts += part
    elif isinstance(part, partial):
        parts += [part.func, *part.args, *part.keywords.values()]
    elif isinstance(part, MethodType | BuiltinMethodType):
        parts.append(part.__self__)
    elif isinstance(part, FunctionType):
        parts += _values_of_closure(part)
        parts += part.__defaults__ or ()
        parts += (part.__kwdefaults__ or {}).values()
        parts += _generators_of_globals(part)
    return parts


def _values_of_slots(part: Any) -> list[Any]:
    """The values of an object's ``__slots__``. One that is not set yet has none."""
    values = []
    for base in type(part).__mro__:
        if "__slots__" not in vars(base):
            continue
        for slot in vars(base).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    values.append(slot.__get__(part))
    return values


def _values_of_closure(function: FunctionType) -> list[Any]:
    """The values of outer variables that a function reads. One that is not set yet has none."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _generators_of_globals(function: FunctionType) -> list[RandomGenerator]:
    """The global variables that a function reads, as far as they are generators: others lead to all of a file."""
    generators: dict[str, RandomGenerator] = {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, RandomGenerator):
            generators[name] = value
    if not generators:  # nearly always, and reading instructions takes a tenth of the time of a small run
        return []
    # ``co_names`` has names of attributes, too
    read: dict[str, RandomGenerator] = {}
    for instruction in dis.get_instructions(function):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in generators:
            read[instruction.argval] = generators[instruction.argval]
    return [*read.values()]


def read_generators(generators: Sequence[RandomGenerator]) -> list[Any]:
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


def restore_generators(generators: Sequence[RandomGenerator], states: Sequence[Any]) -> None:
    """Restore the result of ``read_generators``."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


def are_states_of(generators: Sequence[RandomGenerator], states: Sequence[Any]) -> bool:
    """Whether states are of as many generators, of the same kinds in the same order."""
    kinds = [_kind_of(state) for state in read_generators(generators)]
    return [_kind_of(state) for state in states] == kinds


def _kind_of(state: Any) -> tuple[Any, ...]:
    """The kind of the generator that an element of ``read_generators`` is of."""
    if isinstance(state, dict):
        return ("numpy", state.get("bit_generator"))
    if isinstance(state, torch.Tensor):
        return ("torch", state.shape)  # it differs between devices
    if isinstance(state, tuple) and len(state) == 5:
        return ("numpy, old", state[0])
    return ("python", type(state))


OWN = 1
"""Sets the seeds of own generators apart from those of ``seed_all``."""


def seed_generators(generators: Sequence[RandomGenerator], seed: int) -> None:
    """Seed generators in place: each with another seed, and none with that of ``seed_all(seed)``, whose numbers they
    would repeat.

    Args:
        seed: Not negative.
    """
    for index, generator in enumerate(generators):
        own = int(np.random.SeedSequence((seed, index, OWN)).generate_state(1)[0])
        if isinstance(generator, np.random.Generator):
            fresh: Any = type(generator.bit_generator)
            generator.bit_generator.state = fresh(own).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        else:
            generator.seed(own)


class OwnGenerators:
    """The generators that a dataset keeps for itself, and their states before anything was read.

    Each process that reads the dataset finds those of its copy once.

    Attributes:
        first_states: See ``read_generators``. A resumed run replaces them by those of the run that it continues.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._generators: list[RandomGenerator] | None = None
        self.first_states = read_generators(self.generators)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generators": None}  # for a worker, which has a copy of the dataset

    @property
    def generators(self) -> list[RandomGenerator]:
        if self._generators is None:
            self._generators = find_generators(self._dataset)
        return self._generators

    def start_epoch(self, epoch: int, seed: int) -> None:
        """Set the generators to states that do not depend on what was read before. A resumed run would read other
        samples, if they continued from the epoch before. In epoch 0, they have the states that the user gave them.

        Args:
            seed: That of the run, not negative.
        """
        if epoch == 0 and are_states_of(self.generators, self.first_states):
            restore_generators(self.generators, self.first_states)
        else:
            seed_generators(self.generators, hash((seed, epoch)) % 2**32)


@contextmanager
def preserve_random_states(enabled: bool = True, own: Sequence[RandomGenerator] = ()) -> Iterator[None]:
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
