"""``Trainer`` keeps the samples, order and batches of the loaders, or raises an error for a setting that it cannot.

Modules:
    core/fastloop/data/custom_sampler.py
    plugins/fastloop_tools/trainer/user_loader.py
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loader_helpers import LOADERS, QUIET, SIZE, EveryOther, Numbers, Rotating, expected, of_processes, train
from log_lines import find_lines
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from fastloop import CheckpointError, Plugin, PluginError, Trainer, UsageError, hookimpl
from fastloop.errors import DataError
from fastloop.testing import ProcessResult, expect_problem, tiny_data, tiny_model


@pytest.mark.parametrize("name", LOADERS)
def test_the_batches_are_those_of_the_loader(name):
    found, _ = train(LOADERS[name](tiny_data(SIZE)))
    assert found == expected(name, epochs=3)


def test_shuffle_true_is_our_order_by_seed_and_epoch_with_the_last_step_dropped_when_asked():
    for drop_last in (False, True):
        found, trainer = train(DataLoader(tiny_data(SIZE), batch_size=4, shuffle=True, drop_last=drop_last), epochs=2)
        orders = [
            torch.randperm(SIZE, generator=torch.Generator().manual_seed(123 + epoch)).tolist() for epoch in (0, 1)
        ]
        whole = [order[first : first + 4] for order in orders for first in range(0, SIZE, 4)]
        assert found == [batch for batch in whole if len(batch) == 4 or not drop_last]
        assert trainer.run.total_steps == len(found)


RANDOM: dict[str, Callable[[], DataLoader[Any]]] = {
    "weighted": lambda: DataLoader(tiny_data(SIZE), 4, sampler=WeightedRandomSampler([1.0] * 5 + [9.0] * 16, 18)),
    "subset": lambda: DataLoader(tiny_data(SIZE), 4, sampler=SubsetRandomSampler(range(10))),
    "replacement": lambda: DataLoader(tiny_data(SIZE), 4, sampler=RandomSampler(range(SIZE), replacement=True)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_sampler_without_a_generator_is_drawn_by_seed_and_epoch(name):
    torch.manual_seed(0)
    first, _ = train(RANDOM[name]())
    half = len(first) // 3
    assert first[:half] != first[half : 2 * half] != first[2 * half :]
    torch.manual_seed(1)
    assert train(RANDOM[name]())[0] == first
    assert train(RANDOM[name](), seed=5)[0] != first
    sampler = RANDOM[name]().sampler
    assert {len(batch) for batch in first[: half - 1]} == {4}
    assert sum(map(len, first[:half])) == len(sampler)
    if name == "weighted":
        counts = torch.bincount(torch.tensor([index for batch in first for index in batch]), minlength=SIZE)
        assert counts[5:].sum() > 4 * counts[:5].sum(), "the weights count"


@pytest.mark.parametrize("name", [*LOADERS, *RANDOM])
def test_a_resumed_run_reads_what_the_uninterrupted_one_does(name):
    def make() -> DataLoader[Any]:
        return RANDOM[name]() if name in RANDOM else LOADERS[name](tiny_data(SIZE))

    whole, trainer = train(make(), output="whole")
    cut = len(whole) // 2
    first, _ = train(make(), max_steps=cut)
    rest, resumed = train(make(), resume=True)
    assert first + rest == whole
    weights, again = trainer.run.full_state_dict(), resumed.run.full_state_dict()
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_a_run_is_not_resumed_in_another_order():
    train(DataLoader(tiny_data(SIZE), batch_size=4), max_steps=3)
    for other in (
        DataLoader(tiny_data(SIZE), batch_size=4, shuffle=True),
        DataLoader(tiny_data(SIZE), batch_size=4, drop_last=True),
        DataLoader(tiny_data(SIZE), batch_size=4, sampler=[*range(1, SIZE), 0]),
    ):
        with expect_problem("data-changed 21", CheckpointError):
            train(other, resume=True)


@pytest.mark.slow
def test_several_processes_read_the_batches_of_one(processes: Callable[..., list[ProcessResult]]):
    names = ("drop_last", "weighted", "set_epoch", "shuffle, generator")
    runs = [{"loader": name, "settings": {"output": name, "epochs": 2}} for name in names]
    both = [process.result for process in processes(2, of_processes, runs)]
    for number, name in enumerate(names):
        shares = [result[number]["ids"] for result in both]
        steps = [sorted(first + second) for first, second in zip(*shares, strict=True)]
        assert steps == [sorted(batch) for batch in expected(name, epochs=2)]
        assert both[0][number]["weights"].keys() == tiny_model().state_dict().keys()


# -- what cannot be kept -----------------------------------------------------------------------------------------------


class Batches(BatchSampler):
    """A batch sampler of the user's."""


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Liar(Endless):
    def __len__(self) -> int:
        return 8


class Named(Liar):
    def __iter__(self) -> Iterator[Any]:
        return iter("abcdefgh")


class Erratic(Liar):
    turns = 0

    def __iter__(self) -> Iterator[int]:
        Erratic.turns += 1
        return iter([(index + Erratic.turns) % SIZE for index in range(8)])


class Locked(Liar):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Looks:
    """Like a loader, and none of torch's."""

    def __init__(self) -> None:
        self.dataset, self.batch_size = tiny_data(SIZE), 4


class Stream(IterableDataset[Any]):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_data(self.size))


class Sharded(Stream):
    shards_itself = True


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "batch sampler": (
        lambda: DataLoader(tiny_data(SIZE), batch_sampler=Batches(range(SIZE), 4, False)),
        "own-sampler train_loader: Batches",
    ),
    "no batches": (
        lambda: DataLoader(tiny_data(SIZE), batch_size=None),
        "wrong-dataset train_loader batch_size=None",
    ),
    "distributed": (
        lambda: DataLoader(tiny_data(SIZE), 4, sampler=DistributedSampler(range(SIZE), 2, 0)),
        "own-sampler train_loader: DistributedSampler sampler= shuffle=True",
    ),
    "own loader": (
        lambda: Own(tiny_data(SIZE), 4),
        "wrong-dataset train_loader: Own __iter__ torch.utils.data.DataLoader",
    ),
    "not a loader": (Looks, "wrong-type train_loader Looks torch.utils.data.DataLoader"),
    "init of a stream": (
        lambda: DataLoader(Stream(), 4, num_workers=2, worker_init_fn=print),
        "wrong-dataset train_loader: worker_init_fn Stream",
    ),
    "dropping what shards itself": (
        lambda: DataLoader(Sharded(), 4, drop_last=True),
        "no-drop-last drop_last=True Sharded drop_last=False",
    ),
    "nothing left": (
        lambda: DataLoader(tiny_data(3), 4, drop_last=True),
        "no-batch drop_last=True 3",
    ),
    "endless": (
        lambda: DataLoader(tiny_data(SIZE), 4, sampler=Endless()),
        "no-length (Endless) __len__",
    ),
    "longer than it says": (
        lambda: DataLoader(tiny_data(SIZE), 4, sampler=Liar()),
        "random-order (Liar) 8",
    ),
    "no numbers": (
        lambda: DataLoader(tiny_data(SIZE), 4, sampler=Named()),
        "wrong-index (Named) 'a'",
    ),
    "never the same": (
        lambda: DataLoader(tiny_data(SIZE), 4, sampler=Erratic()),
        "random-order (Erratic) torch",
    ),
    "not to be copied": (
        lambda: DataLoader(tiny_data(SIZE), 4, sampler=Locked()),
        "not-copyable (Locked) TypeError:",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_loader_is_rejected_by_name_before_writing(case, tmp_path):
    make, expected = REFUSED[case]
    with expect_problem(expected, UsageError):
        train(make())
    assert not list(tmp_path.iterdir())


def test_an_evaluation_of_a_stream_drops_nothing():
    with expect_problem("no-drop-last drop_last=True", UsageError):
        train(tiny_data(SIZE), DataLoader(Stream(), 4, drop_last=True), batch_size=4)


def test_changed_sampler_during_training_is_detected():
    class Curriculum(EveryOther):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.ones(3)

    sampler = Curriculum()

    class Update(Plugin):
        name = "update"

        @hookimpl
        def after_epoch(self) -> None:
            sampler.set_epoch(7)  # fastloop calls it itself: no harm
            sampler.weights[0] = 2.0

    with expect_problem("sampler-changed", DataError):
        train(DataLoader(tiny_data(SIZE), 4, sampler=sampler), plugins=[Update()])


def test_sample_audit_rejects_sampler_with_repeats():
    for loader in (RANDOM["weighted"](), DataLoader(tiny_data(SIZE), 4, drop_last=True)):
        with expect_problem("samples-left-out plugins.sample-audit", PluginError):
            train(loader, plugins=["sample-audit"])
    assert len(train(DataLoader(tiny_data(SIZE), 4, sampler=Rotating()), plugins=["sample-audit"])[0]) == 18


def test_a_subset_is_a_dataset_and_not_a_loader_of_the_whole():
    found, _ = train(Subset(tiny_data(SIZE), range(6)), batch_size=4, epochs=1)
    assert sorted(index for batch in found for index in batch) == list(range(6))


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [20, 21])
def test_a_stream_with_drop_last_ends_with_its_last_full_step(size, workers):
    loader = DataLoader(Stream(size), batch_size=4, drop_last=True, num_workers=workers)
    found, trainer = train(loader, micro_batch_size=2, max_steps=30, epochs=2)
    assert found == 2 * [list(range(first, first + 4)) for first in range(0, 20, 4)]
    assert trainer.run.state.samples == 40


@pytest.mark.parametrize("size", [1, 7, 8, 12, 15, 16, 23])
def test_a_stream_with_drop_last_gives_processes_the_same_full_steps(size):
    from fastloop import Settings
    from fastloop.data import Loader

    drop = BatchSampler(range(size), 8, drop_last=True)
    shares = []
    for rank in range(4):
        numbers: Any = Stream(size)
        loader = Loader(
            numbers,
            list,
            Settings(),
            batch_size=8,
            micro_batch_size=1,
            rank=rank,
            world_size=4,
            seed=5,
            shuffle=True,
            sampler=drop,
        )
        shares.append(list(loader.steps()))
    steps = [[index for step in steps for batch in step for index in batch.ids] for steps in zip(*shares, strict=True)]
    assert [sorted(step) for step in steps] == [list(range(first, first + 8)) for first in range(0, size - 7, 8)]
    assert all(batch.samples == 1 for share in shares for step in share for batch in step)


# -- workers -----------------------------------------------------------------------------------------------------------


class Asks(Numbers):
    """Returns the reader: the worker's own copy, set up by ``mark``."""

    mark = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.ones(8) * (self.mark if info is not None else -1), 0


def mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = 10 + worker


def test_workers_are_set_up_as_the_loader_says():
    seen: list[float] = []

    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(inputs[0, 0].item())
            return self.layer(inputs)

    reading = {
        "persistent_workers": True,
        "prefetch_factor": 3,
        "timeout": 77,
        "multiprocessing_context": "fork",
        "worker_init_fn": mark,
    }
    loader = DataLoader(Asks(), batch_size=4, num_workers=2, **reading)
    settings: dict[str, Any] = {"loss": nn.functional.cross_entropy, "epochs": 1, "device": "cpu"}
    trainer = Trainer(Sees(), loader, DataLoader(Asks(), batch_size=4), plugins=QUIET, output="run", **settings)
    trainer.fit()
    assert seen == [10.0, 11.0, 10.0, 11.0, 10.0, 11.0] + [-1.0] * 6, "training by two workers, evaluation by none"
    used = trainer.run.train_loader.loader
    assert (used.num_workers, used.prefetch_factor, used.persistent_workers) == (2, 3, True)
    assert used.multiprocessing_context.get_start_method() == "fork"
    assert used.limit == 77
    assert trainer.run.settings.num_workers == 2
    assert trainer.run.eval_loaders["validation"].loader.num_workers == 0


def test_plugin_overrides_loader_workers_with_a_message(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    loader = DataLoader(tiny_data(SIZE), batch_size=4, num_workers=2)
    plain, _ = train(DataLoader(tiny_data(SIZE), batch_size=4), output="plain")
    found, trainer = train(loader, tiny_data(8), plugins=[{"dataloader-workers": {"num_workers": 1}}])
    assert found == plain
    assert trainer.run.train_loader.loader.num_workers == trainer.run.eval_loaders["validation"].loader.num_workers == 1
    assert find_lines(caplog, "train: num_workers=2 'dataloader-workers' 1")
    assert find_lines(caplog, "train: SequentialSampler")


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation_takes_the_samples_batches_and_collator_of_its_own_loader():
    sizes: list[int] = []
    read: list[int] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: torch.Tensor) -> Any:
            if not self.training:
                sizes.append(len(x))
                read.extend(x.flatten().int().tolist())
            return {"loss": self.layer(x).square().mean(), "logits": x}

    def plus(number: int) -> Callable[[list[int]], Any]:
        return lambda samples: {"x": torch.tensor(samples).float()[:, None] + number}

    loaders = [
        DataLoader(Numbers(), batch_size=3, collate_fn=plus(0)),
        DataLoader(Numbers(), batch_size=4, collate_fn=plus(100), drop_last=True, sampler=range(SIZE - 1, -1, -1)),
        DataLoader(Numbers(), batch_size=8, collate_fn=plus(200)),
    ]
    Trainer(Keeps(), *loaders, plugins=QUIET, epochs=1, output="run", device="cpu").fit()
    trial = [3, 3, 1, 2]  # the first batch of training, twice, and its halves: whether the loss is a mean
    assert sizes == trial + [4] * 5 + [8, 8, 5]
    assert read[sum(trial) :] == [100 + index for index in range(20, 0, -1)] + [200 + index for index in range(SIZE)]
    sizes.clear()
    Trainer(Keeps(), *loaders, plugins=QUIET, epochs=1, output="run", device="cpu", eval_batch_size=10).fit()
    assert sizes == [*trial, 10, 10, 10, 10, 1], "what is asked for by name counts; the loader's drop_last stays"
