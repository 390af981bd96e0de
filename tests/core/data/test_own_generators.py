"""Generators that datasets and collators keep for themselves.

Each worker and process has a copy, none repeats another's, and a resumed run continues with their numbers.

Modules:
    core/fastloop/runtime/random_states.py
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from fastloop import Plugin, Trainer, checkpoint, hookimpl
from fastloop.data.iterables import Stream
from fastloop.runtime import random_states
from fastloop.runtime.random_states import (
    OwnGenerators,
    find_generators,
    restore_random_states,
    seed_all,
    seed_generators,
)

SAMPLES = 24
DRAWS: dict[str, Callable[[Any], float]] = {
    "numpy": lambda generator: float(generator.random()),
    "numpy, old": lambda generator: float(generator.random_sample()),
    "torch": lambda generator: float(torch.rand((), generator=generator)),
    "python": lambda generator: generator.random(),
}
MADE: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy, old": lambda: np.random.RandomState(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "python": lambda: random.Random(0),
}


class Noise:
    """A transform with a generator of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.generator = MADE[kind]()

    def __call__(self) -> float:
        return DRAWS[self.kind](self.generator)


class Noisy(Dataset):
    """Samples with noise, which is their target."""

    def __init__(self, kind: str) -> None:
        self.transforms = [Noise(kind)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), float(index)), torch.tensor([self.transforms[0]()], dtype=torch.float64)


class Draws(Plugin):
    """Records the noise of each sample."""

    name = "draws"

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    @hookimpl
    def before_step(self, batches: Any) -> None:
        for batch in batches:
            inputs, targets = batch.inputs
            if batch.samples:
                self.seen |= dict(zip(inputs.flatten().int().tolist(), targets.flatten().tolist(), strict=True))


def noise(kind: str, workers: int, plugins: tuple[Any, ...] = ()) -> dict[int, float]:
    """The noise of each sample in an epoch."""
    draws = Draws()
    reading = [{"dataloader-workers": {"num_workers": workers}}] if workers else []
    usual = {"loss": lambda output, target: (output - target.float()).square().mean(), "batch_size": 4, "device": "cpu"}
    data = Subset(Noisy(kind), range(SAMPLES))
    Trainer(nn.Linear(1, 1), data, plugins=[draws, *reading, *plugins], epochs=1, output="run", **usual).fit()
    return draws.seen


rng = np.random.default_rng(0)
"""A global variable with the name of an attribute that ``draw_of`` reads."""


class Source:
    """Has a generator, and is no dataset."""

    rng = np.random.default_rng(1)


SOURCE = Source()


def draw_of(sample: float) -> float:
    return sample + float(SOURCE.rng.random())


def test_a_global_variable_with_the_name_of_an_attribute_is_not_found():
    assert find_generators([draw_of]) == []


@pytest.mark.parametrize("kind", MADE)
def test_the_generator_in_a_transform_is_found(kind):
    data = Subset(Noisy(kind), range(SAMPLES))
    assert find_generators(data) == [data.dataset.transforms[0].generator]


SHARED: dict[str, Any] = {
    "modules": [np, np.random, random, torch],
    "methods": [random.choice, random.random, np.random.choice],
    "random_state=None of scikit-learn": np.random.mtrand._rand,
    "torch": torch.default_generator,
}


@pytest.mark.parametrize("shared", SHARED)
def test_the_generators_that_all_code_shares_are_not_found(shared: str) -> None:
    data = Noisy("numpy")
    data.shared = SHARED[shared]
    assert find_generators(data) == [data.transforms[0].generator]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_generators_of_cuda_that_all_code_shares_are_not_found() -> None:
    torch.cuda.init()
    assert find_generators([torch.cuda.default_generators]) == []


def test_an_iterable_dataset_leaves_the_generators_that_all_code_shares_as_they_are() -> None:
    data = Shuffled()
    data.choose = random.choice
    random.seed(5)
    expected = random.getstate()
    stream = Stream(data, batch=4, rank=0, world_size=1, seed=0)
    stream.set_position(1, 0)  # an epoch that seeds own generators
    list(stream)
    assert random.getstate() == expected


def test_a_generator_without_a_state_is_not_found() -> None:
    generator = random.Random(0)
    assert find_generators([random.SystemRandom(), generator]) == [generator]


class Slotted:
    """A transform whose attributes are in slots. One of them is not set."""

    __slots__ = ("__generator", "unset")

    def __init__(self, generator: Any) -> None:
        self.__generator = generator


def of_defaults(generator: Any) -> Callable[..., Any]:
    def collate(samples: list[Any], generator: Any = generator) -> float:
        return generator.random()

    return collate


def of_keyword_defaults(generator: Any) -> Callable[..., Any]:
    def collate(samples: list[Any], *, generator: Any = generator) -> float:
        return generator.random()

    return collate


PLACES: dict[str, Callable[[random.Random], Any]] = {
    "slot": Slotted,
    "default": of_defaults,
    "default of a keyword": of_keyword_defaults,
    "method in C": lambda generator: generator.random,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_found_where_python_keeps_it(place: str) -> None:
    generator = random.Random(0)
    assert find_generators([PLACES[place](generator)]) == [generator]


def test_the_search_ends_among_many_samples() -> None:
    class Samples:
        def __init__(self) -> None:
            self.visited = 0
            self.rows = [[Sample(self) for _ in range(100)] for _ in range(100)]
            self.many = [self.rows, [[Sample(self) for _ in range(100)] for _ in range(100)]]
            self.transform = Noise("numpy")

    class Sample:
        def __init__(self, owner: Samples) -> None:
            self.owner = owner

        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                object.__getattribute__(self, "owner").visited += 1
            return object.__getattribute__(self, name)

    data = Samples()
    assert find_generators(data) == [data.transform.generator]
    assert 0 < data.visited <= 10_000  # of 20,000


@pytest.mark.parametrize("kind", MADE)
def test_seeded_generators_draw_other_numbers_than_the_global_ones(kind: str) -> None:
    draws = {
        "numpy": lambda: np.random.default_rng(7).random(),
        "numpy, old": np.random.random_sample,
        "torch": lambda: float(torch.rand(())),
        "python": random.random,
    }
    seed_all(7)
    shared = draws[kind]()
    pair = [Noise(kind), Noise(kind)]
    seed_generators([noise.generator for noise in pair], 7)
    numbers = [noise() for noise in pair]
    assert len({shared, *numbers}) == 3
    seed_generators([noise.generator for noise in pair], 7)
    assert [noise() for noise in pair] == numbers


@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_workers_draw_other_numbers_and_their_number_changes_none(kind):
    two = noise(kind, 2)
    assert len(set(two.values())) == SAMPLES
    assert noise(kind, 1) == two


def both(_: Any = None) -> dict[int, float]:
    return noise("numpy", 0, ("ddp",))


@pytest.mark.slow
def test_processes_draw_other_numbers(processes, tmp_path):
    drawn = [process.result for process in processes(2, both, folder=tmp_path)]
    values = [value for process in drawn for value in process.values()]
    assert len(set(values)) == len(values) == SAMPLES


def test_without_workers_the_numbers_are_those_of_the_generator():
    expected = np.random.default_rng(0)
    assert sorted(noise("numpy", 0).values()) == sorted(float(expected.random()) for _ in range(SAMPLES))


# -- collators ---------------------------------------------------------------------------------------------------------


class NoisyCollator:
    """Adds noise to each sample of a batch."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        (inputs,) = default_collate(samples)
        return inputs, torch.from_numpy(self.generator.random((len(inputs), 1)))

    def collate(self, samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        return self(samples)


def add_noise(collate: Callable[..., Any], samples: list[tuple[Tensor, ...]]) -> Any:
    return collate(samples)


def of_closure() -> Callable[..., Any]:
    collate = NoisyCollator()
    return lambda samples: collate(samples)


COLLATORS: dict[str, Callable[[], Callable[..., Any]]] = {
    "object": NoisyCollator,
    "method": lambda: NoisyCollator().collate,
    "partial": lambda: partial(add_noise, NoisyCollator()),
    "closure": of_closure,
}


@pytest.mark.parametrize("kind", COLLATORS)
def test_the_generator_of_a_collator_is_found(kind: str) -> None:
    assert len(find_generators(COLLATORS[kind]())) == 1


class Numbers(IterableDataset[Any]):
    """The numbers from 0 on, in order."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        yield from ((torch.full((1,), float(index)),) for index in range(SAMPLES))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.float()).square().mean()


def train(data: Any, collate: Any = None, *, workers: int = 0, output: str = "run", **options: Any) -> list[Any]:
    """The inputs and targets of each step of two epochs, which has four samples."""
    steps = Steps(options.pop("stop", None))
    loader = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=collate)
    evaluated = DataLoader(data, batch_size=4, collate_fn=collate)  # a start of workers takes a tenth of a second
    usual = {"loss": mean_square, "epochs": 2, "evaluate_every": 2, "device": "cpu", "output": output}
    plugins = [steps, *options.pop("plugins", ())]
    trainer = Trainer(nn.Linear(1, 1), loader, evaluated, plugins=plugins, **usual | options)
    with nullcontext() if steps.stop is None else pytest.raises(KeyboardInterrupt):
        trainer.fit()
    return steps.seen


class Steps(Plugin):
    """Records the batches of each step, and ends the run after a step."""

    name = "steps"

    def __init__(self, stop: int | None) -> None:
        super().__init__()
        self.stop = stop
        self.seen: list[Any] = []

    @hookimpl
    def before_step(self, batches: Any) -> None:
        self.seen.append([tensor.flatten().tolist() for batch in batches for tensor in batch.inputs])

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step == self.stop:
            run.signals.record("SIGINT")


@pytest.mark.parametrize("data", ["map-style", "iterable"])
def test_workers_draw_other_numbers_in_a_collator_and_their_number_changes_none(data: str) -> None:
    numbers: Any = Numbers() if data == "iterable" else TensorDataset(torch.arange(float(SAMPLES))[:, None])
    two = train(numbers, NoisyCollator(), workers=2)
    drawn = [number for _, targets in two for number in targets]
    assert len(set(drawn)) == len(drawn) == 2 * SAMPLES
    assert train(numbers, NoisyCollator(), workers=1) == two


# -- a resumed run -----------------------------------------------------------------------------------------------------


class Shuffled(IterableDataset[Any]):
    """Samples in an order that the dataset draws anew in each pass."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.generator.permutation(SAMPLES):
            yield torch.full((1,), float(index)), torch.zeros(1)


class OfEpochs(Dataset[Any]):
    """Samples whose target is the epoch and a random number below 1. The epoch seeds their generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.generator.bit_generator.state = np.random.PCG64(epoch).state

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((1,), float(index)), torch.tensor([self.epoch + self.generator.random()])


def data_of(case: str) -> tuple[Any, Any]:
    """The dataset and the collator of a case."""
    if case == "collator":
        return TensorDataset(torch.arange(float(SAMPLES))[:, None]), NoisyCollator()
    if case == "set_epoch":
        return OfEpochs(), None
    return (Shuffled() if case == "iterable" else Noisy(case)), None


@pytest.mark.parametrize("case", [*MADE, "collator", "iterable", "set_epoch"])
def test_a_resumed_run_continues_in_the_middle_of_an_epoch(case: str) -> None:
    whole = train(*data_of(case), output="whole")
    stopped = train(*data_of(case), output="cut", stop=8)
    assert stopped == whole[:8]
    assert train(*data_of(case), output="cut", resume=True) == whole[8:]


def test_an_iterable_dataset_draws_an_order_for_each_epoch_with_any_number_of_workers() -> None:
    alone = train(Shuffled())
    first = [number for inputs, _ in alone[:6] for number in inputs]
    second = [number for inputs, _ in alone[6:] for number in inputs]
    assert first == np.random.default_rng(0).permutation(SAMPLES).tolist()
    assert sorted(second) == sorted(first)
    assert second != first
    assert train(Shuffled(), workers=2) == alone


class Unseeded(Shuffled):
    """Its order is another one in each process."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()


def inputs_of(steps: list[Any]) -> list[float]:
    return [number for inputs, _ in steps for number in inputs]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_run_resumed_in_its_first_epoch_reads_each_sample_once(is_same: bool) -> None:
    data = Unseeded()
    before = train(data, output="cut", stop=2)
    after = train(data if is_same else Unseeded(), output="cut", resume=True)
    assert len(before) == 2
    assert sorted(inputs_of(before + after[:4])) == list(range(SAMPLES))


def test_a_resumed_run_evaluates_the_samples_in_the_order_of_the_first_run() -> None:
    """Its first states are those of the checkpoint, also for a dataset that was read already."""
    data = Unseeded()
    first = OwnGenerators(data).first_states
    train(data, output="cut", stop=8)
    train(data, output="cut", resume=True)
    saved = checkpoint.read(checkpoint.find_newest(Path("cut")).checkpoint)[1]
    assert saved["random"][0]["first"] == {"train": first, "validation": first}


class Ordered(IterableDataset[Any]):
    """Samples in their order, with a target of 0."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(SAMPLES):
            yield torch.full((1,), float(index)), torch.zeros(1)


OTHERS: dict[str, Callable[[], list[Any]]] = {
    "PCG64 to MT19937": lambda: [np.random.Generator(np.random.MT19937(0))],
    "PCG64 to Python's": lambda: [random.Random(0)],
    "PCG64 to torch's": lambda: [torch.Generator()],
    "PCG64 to NumPy's old one": lambda: [np.random.RandomState(0)],
    "one more": lambda: [np.random.default_rng(0), np.random.default_rng(0)],
    "none": list,
}


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("data", ["map-style", "iterable"])
def test_a_resumed_run_with_other_generators_keeps_theirs_and_says_so(data: str, change: str, caplog: Any) -> None:
    samples = torch.arange(float(SAMPLES))[:, None]
    made: Any = TensorDataset(samples, samples) if data == "map-style" else Ordered()
    made.generators = [np.random.default_rng(0)]
    train(made, output="cut", stop=2)
    made.generators = OTHERS[change]()
    caplog.set_level(logging.INFO, "fastloop")
    assert len(train(made, output="cut", resume=True)) == 10
    lines = [line for line in caplog.messages if "has the states of other generators" in line]
    assert len(lines) == 1


def test_a_checkpoint_without_own_generators_resumes_silently(caplog: Any) -> None:
    train(Ordered(), output="cut", stop=2)
    data = Ordered()
    data.generator = np.random.default_rng(0)
    caplog.set_level(logging.INFO, "fastloop")
    assert len(train(data, output="cut", resume=True)) == 10
    assert "resumed from" in caplog.text
    assert "other generators" not in caplog.text


def test_the_states_of_an_own_generator_that_are_malformed_are_an_error() -> None:
    generator = np.random.default_rng(0)
    state = {"bit_generator": "PCG64"}
    with pytest.raises(KeyError):
        restore_random_states(random_states.random_states() | {"own": [state]}, [generator])


def test_a_dataset_is_searched_once_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def search(*values: Any) -> list[Any]:
        searched.append(values)
        return find_generators(*values)

    monkeypatch.setattr(random_states, "find_generators", search)
    stream = Stream(Shuffled(), batch=4, rank=0, world_size=1, seed=0)
    for epoch in range(3):
        stream.set_position(epoch, 0)
        list(stream)
    assert len(searched) == 1


def test_a_copy_of_a_stream_sets_the_generators_of_its_own_dataset() -> None:
    stream = Stream(Shuffled(), batch=4, rank=0, world_size=1, seed=0)
    copied = pickle.loads(pickle.dumps(stream))
    stream.dataset.generator.random()
    assert list(copied) == list(stream)


def test_set_epoch_may_seed_the_generator_of_a_dataset() -> None:
    class SeedsItself(Shuffled):
        def set_epoch(self, epoch: int) -> None:
            self.generator.bit_generator.state = np.random.PCG64(10 + epoch).state

    read = inputs_of(train(SeedsItself()))
    assert read[:SAMPLES] == np.random.default_rng(10).permutation(SAMPLES).tolist()
    assert read[SAMPLES:] == np.random.default_rng(11).permutation(SAMPLES).tolist()


class ReadsEpoch(Plugin):
    """Reads the first epoch again after a step of the second one."""

    name = "reads-epoch"

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step == 8:
            batches = list(run.training_batches(0))
            assert [int(target) for batch in batches for target in batch.inputs[1]] == [0] * SAMPLES


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_dataset_gets_each_epoch(workers: int) -> None:
    steps = train(OfEpochs(), workers=workers, plugins=[ReadsEpoch()])
    targets = [int(target) for _, targets in steps for target in targets]
    assert targets == [0] * SAMPLES + [1] * SAMPLES


# -- datasets that shard themselves ------------------------------------------------------------------------------------


class SharesOut(IterableDataset[Any]):
    """Each reader takes its share of an order that all draw from copies of one generator. Targets are noise of torch's
    global generator."""

    shards_itself = True

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        workers = 1 if info is None else info.num_workers
        reader = worker
        readers = workers
        if distributed.is_initialized():
            reader = distributed.get_rank() * workers + worker
            readers = distributed.get_world_size() * workers
        for index in self.generator.permutation(SAMPLES)[reader::readers]:
            yield torch.full((1,), float(index)), torch.rand(1)


class SeedsEpochs(SharesOut):
    """Its order depends on the epoch alone."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = np.random.default_rng(epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_of_a_dataset_that_shards_itself_agree_on_an_order_and_not_on_noise(workers: int) -> None:
    steps = train(SharesOut(), workers=workers)
    read = inputs_of(steps)
    assert sorted(read[:SAMPLES]) == sorted(read[SAMPLES:]) == list(range(SAMPLES))
    drawn = [number for _, targets in steps for number in targets]
    assert len(set(drawn)) == len(drawn) == 2 * SAMPLES


def shared_out(workers: int) -> list[Any]:
    return train(SharesOut(), workers=workers, plugins=["ddp"], epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_processes_that_read_a_dataset_that_shards_itself_agree_on_an_order(processes, tmp_path, workers):
    each = [process.result for process in processes(2, shared_out, workers, folder=tmp_path)]
    read = [number for steps in each for number in inputs_of(steps)]
    assert sorted(read) == list(range(SAMPLES))
    drawn = [number for steps in each for _, targets in steps for number in targets]
    assert len(set(drawn)) == len(drawn) == SAMPLES


@pytest.mark.parametrize(("data", "workers"), [(SharesOut, 0), pytest.param(SeedsEpochs, 2, marks=pytest.mark.slow)])
def test_a_dataset_that_shards_itself_continues_with_the_numbers_of_the_next_epoch(data: Any, workers: int) -> None:
    whole = train(data(), workers=workers, output="whole")
    first = train(data(), workers=workers, output="cut", epochs=1)
    second = train(data(), workers=workers, output="cut", resume=True)
    assert inputs_of(first + second) == inputs_of(whole)
    assert inputs_of(first) != inputs_of(second)
