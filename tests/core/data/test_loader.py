"""Batches of a loader: map-style datasets, streams, steps that a plugin splits, samples that are read ahead.

Modules:
    core/fastloop/data/datasets.py
    core/fastloop/data/iterables.py
    core/fastloop/data/loader.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset, get_worker_info

from fastloop import Batch, Settings
from fastloop.data import Loader
from fastloop.data.datasets import fingerprint
from fastloop.data.sampler import AHEAD
from fastloop.errors import DataError
from fastloop.testing import expect_problem, find_problems, tiny_data


class Stream(IterableDataset[Any]):
    """Counts up. Looks at the worker as a careless dataset would not: it would be wrong to shard twice."""

    def __init__(self, size: int, careful: bool = False) -> None:
        self.size, self.careful = size, careful
        self.offset = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.careful else None
        first, every = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor(index + self.offset) for index in range(first, self.size, every))


class Epochs(Stream):
    def set_epoch(self, epoch: int) -> None:
        self.offset = 1000 * epoch


class Sharded(Stream):
    shards_itself = True


class Positions(IterableDataset[Any]):
    """Reads the requested positions, and records them. The sample at a position is ``epoch * 1000 + position``; its id,
    the same backwards."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[range] = []

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read_ranges replaces it")

    def read_ranges(self, epoch: int, ranges: Iterable[range]) -> Iterator[list[tuple[int, Any]]]:
        for positions in ranges:
            self.asked.append(positions)
            yield [(self.size - 1 - position, torch.tensor(epoch * 1000 + position)) for position in positions]


class Grows(TensorDataset):
    """16 samples, and 20 from the first that is read on."""

    size = 16

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        self.size = 20
        return super().__getitem__(index)


class Noisy(TensorDataset):
    """Each sample with a random number, as an augmentation draws them."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)[0], torch.rand(())


def loader(
    data: Any,
    batch: int = 8,
    device: int = 4,
    rank: int = 0,
    world: int = 1,
    collator: Any = torch.stack,
    **settings: Any,
) -> Loader:
    return Loader(
        data,
        collator,
        Settings(**settings),
        batch_size=batch,
        micro_batch_size=device,
        rank=rank,
        world_size=world,
        seed=5,
        shuffle=True,
    )


def contents(batches: Any) -> list[Any]:
    return [batch.inputs.tolist() for batch in batches]


def test_a_dataset_that_grows_is_one_warning_and_keeps_its_first_length(tiny_run, caplog):
    ran = tiny_run(data=Grows(*tiny_data(20).tensors))
    assert ran.summary["samples"] == 2 * 16
    assert len(find_problems(caplog, "wrong-length Grows 20 16")) == 1


@pytest.mark.slow
# this machine may have fewer than three processors
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("dataset", [Stream, lambda size: Stream(size, careful=True)], ids=["plain", "sharding itself"])
def test_a_stream_gives_the_same_batches_for_any_number_of_workers(dataset):
    expected = [list(range(begin, min(begin + 4, 23))) for begin in range(0, 23, 4)]
    for workers in (0, 1, 3):
        found = loader(dataset(23), num_workers=workers)
        assert contents(found.batches()) == expected
        assert contents(found.batches(start=8)) == expected[2:]
        assert found.steps_per_epoch() is None
        assert [batch.worker for batch in found.batches()] == [
            number % workers if workers else -1 for number in range(6)
        ]


@pytest.mark.parametrize(
    ("workers", "size"),
    [
        *((0, size) for size in (1, 4, 8, 9, 16, 17, 21, 23, 24)),
        (2, 17),
        *(pytest.param(2, size, marks=pytest.mark.slow) for size in (1, 4, 8, 9, 16, 21, 23, 24)),
    ],
)
def test_stream_is_divided_between_processes_in_step(size, workers):
    shares = [
        list(loader(Stream(size), batch=16, device=2, rank=rank, world=4, num_workers=workers).steps())
        for rank in range(4)
    ]
    assert len({tuple(len(step) for step in share) for share in shares}) == 1
    rounds = [micro_step for steps in zip(*shares, strict=True) for micro_step in zip(*steps, strict=True)]
    counted = [
        sample for micro_step in rounds for batch in micro_step if batch.samples for sample in batch.inputs.tolist()
    ]
    assert counted == list(range(size))


@pytest.mark.parametrize("size", [1, 9, 16, 17, 24])
def test_ranges_are_divided_between_processes_in_step(size):
    for workers in (0, 2) if size == 17 else (0,):
        shares = [
            list(loader(Positions(size), batch=16, device=2, rank=rank, world=4, num_workers=workers).steps(1))
            for rank in range(4)
        ]
        assert len({tuple(len(step) for step in share) for share in shares}) == 1
        rounds = [micro_step for steps in zip(*shares, strict=True) for micro_step in zip(*steps, strict=True)]
        counted = [batch for micro_step in rounds for batch in micro_step if batch.samples]
        assert [sample for batch in counted for sample in batch.inputs.tolist()] == list(range(1000, 1000 + size))
        assert [number for batch in counted for number in batch.ids] == list(reversed(range(size)))


def test_a_start_reads_later_ranges_only():
    found = loader(data := Positions(23))
    assert contents(found.batches(start=8)) == [list(range(begin, min(begin + 4, 23))) for begin in range(8, 23, 4)]
    assert data.asked == [range(8, 12), range(12, 16), range(16, 20), range(20, 23)]
    assert (found.steps_per_epoch(), found.samples_per_epoch) == (3, 23)


def test_ranges_of_an_incomplete_step_are_dropped_on_request():
    sampler = BatchSampler(SequentialSampler(range(23)), 8, drop_last=True)
    settings: Any = {"batch_size": 8, "micro_batch_size": 4, "rank": 0, "world_size": 1, "seed": 5, "shuffle": True}
    found = Loader(Positions(23), torch.stack, Settings(), sampler=sampler, **settings)
    assert (found.steps_per_epoch(), found.samples_per_epoch) == (2, 16)
    assert [sample for batch in contents(found.batches()) for sample in batch] == list(range(16))


def test_a_stream_that_shards_itself_is_left_to_it():
    found = contents(loader(Sharded(12, careful=True), num_workers=2).batches())
    assert sorted(itertools.chain(*found)) == list(range(12))


def test_persistent_workers_see_each_epoch_and_start():
    found = loader(Epochs(8), num_workers=2, persistent_workers=True)
    assert contents(found.batches(0)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert contents(found.batches(2)) == [[2000, 2001, 2002, 2003], [2004, 2005, 2006, 2007]]
    assert contents(found.batches(2, start=4)) == [[2004, 2005, 2006, 2007]]
    found.close()


def test_random_numbers_of_samples_do_not_depend_on_the_number_of_workers_or_on_the_start():
    def pairs(samples: list[Any]) -> Any:
        return torch.stack([torch.stack(sample) for sample in samples])

    data = Noisy(torch.arange(20.0))
    one, two = (contents(loader(data, collator=pairs, num_workers=workers).batches(1)) for workers in (1, 2))
    assert one == two
    assert contents(loader(data, collator=pairs, num_workers=1).batches(1, start=8)) == one[2:]


def test_loading_draws_nothing_from_the_global_random_state():
    for workers in (0, 1):
        torch.manual_seed(3)
        list(
            loader(
                TensorDataset(torch.arange(20.0)), collator=torch.utils.data.default_collate, num_workers=workers
            ).batches()
        )
        drawn = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize(
    ("size", "groups"),
    [(16, [[4, 4], [4, 4]]), (17, [[4, 4], [4, 4], [1]]), (22, [[4, 4], [4, 4], [4, 2]]), (3, [[3]])],
)
def test_micro_batches_are_grouped_into_steps(size, groups):
    for data in (torch.arange(size), Stream(size)):
        steps = list(loader(data).steps())
        assert [[batch.samples for batch in step] for step in steps] == groups
        assert [[batch.loss_weight for batch in step] for step in steps] == groups
    assert loader(torch.arange(size)).steps_per_epoch() == len(groups)


def test_process_without_samples_computes_filler_with_zero_weight():
    def collate(samples: list[Any]) -> Batch:
        return Batch(torch.stack(samples), loss_weight=10 * len(samples), tokens=100)

    for data in (torch.arange(9), Stream(9)):
        last = [
            list(loader(data, batch=8, device=2, rank=rank, world=4, collator=collate).batches())[-1]
            for rank in range(4)
        ]
        assert [(batch.samples, batch.loss_weight, batch.tokens, len(batch.inputs)) for batch in last] == [
            (1, 10, 100, 1)
        ] + [(0, 0, 0, 1)] * 3


def test_sample_error_names_index_and_dataset():
    class Bad(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("no such image")

    with expect_problem("reading-failed OSError", DataError):
        list(loader(Bad(torch.arange(8))).batches())


# -- steps that a plugin splits ----------------------------------------------------------------------------------------


def by_value(dataset: Any, ids: list[int], processes: int) -> list[list[int]]:
    """Uneven parts: the odd ids in groups of three, then each even id alone."""
    odd = [index for index in ids if index % 2]
    return [odd[first : first + 3] for first in range(0, len(odd), 3)] + [[index] for index in ids if not index % 2]


def split_steps(rank: int, world: int, start: int = 0, workers: int = 0) -> list[list[Batch]]:
    return list(
        loader(torch.arange(67), batch=8, rank=rank, world=world, num_workers=workers, split_step=by_value).steps(
            2, start
        )
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_split_step_has_its_samples_once_on_any_number_of_processes_which_keep_in_step(world):
    shares = [split_steps(rank, world) for rank in range(world)]
    assert len({tuple(len(step) for step in share) for share in shares}) == 1
    order = torch.randperm(67, generator=torch.Generator().manual_seed(5 + 2)).tolist()
    for number, steps in enumerate(zip(*shares, strict=True)):
        wanted = order[8 * number : 8 * number + 8]
        drawn = [batch.ids for micro_step in zip(*steps, strict=True) for batch in micro_step if batch.samples]
        assert [list(ids) for ids in drawn] == by_value(None, wanted, world)
        assert sum(batch.loss_weight for step in steps for batch in step) == len(wanted)
        assert all(len(batch.inputs) for step in steps for batch in step)
    assert number == 8


def test_split_steps_vary_in_their_micro_steps_and_come_the_same_from_workers_and_a_start():
    whole = [[batch.ids for batch in step] for step in split_steps(1, 2)]
    assert len({len(step) for step in whole}) > 1
    assert [[batch.ids for batch in step] for step in split_steps(1, 2, workers=2)] == whole
    assert [[batch.ids for batch in step] for step in split_steps(1, 2, start=24)] == whole[3:]


# -- reading ahead -----------------------------------------------------------------------------------------------------


class OnDisk(TensorDataset):
    """Numbers. Records which samples the loader announces, and which it reads."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.arange(size))
        self.events = list[tuple[str, list[int]]]()

    def read_at_random(self) -> Callable[[Sequence[int]], None]:
        return lambda ids: self.events.append(("announced", list(ids)))

    def __getitems__(self, ids: list[int]) -> list[torch.Tensor]:
        self.events.append(("read", list(ids)))
        return [self.tensors[0][index] for index in ids]


def test_a_dataset_learns_the_samples_of_shuffled_batches_before_they_are_read():
    dataset, size = OnDisk(4 * (AHEAD + 4)), 4
    plain = loader(torch.arange(len(dataset)), batch=size, device=size)
    expected = [batch.ids for batch in plain.batches(epoch=1, start=8)]
    found = [batch.ids for batch in loader(dataset, batch=size, device=size).batches(epoch=1, start=8)]
    assert found == expected
    announced = [ids for kind, ids in dataset.events if kind == "announced"]
    read = [ids for kind, ids in dataset.events if kind == "read"]
    assert announced == read
    first = [kind for kind, _ in dataset.events].index("read")
    assert first == AHEAD + 1


def test_a_dataset_that_is_read_in_order_announces_nothing():
    dataset = OnDisk(40)
    sizes: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 4, "rank": 0, "world_size": 1, "seed": 5}
    in_order = Loader(dataset, torch.stack, Settings(), shuffle=False, **sizes)
    ids = [index for batch in in_order.batches() for index in batch.ids]
    assert ids == list(range(40))
    assert {kind for kind, _ in dataset.events} == {"read"}


class Named(list[int]):
    """A dataset with a fingerprint of its own."""

    def fingerprint(self) -> str:
        return "5ab0"


def test_the_identity_of_a_dataset_keeps_its_text_which_checkpoints_store():
    assert fingerprint(range(1200)) == "1200 samples"
    assert fingerprint([0]) == "1 samples"
    assert fingerprint(Named([0, 1])) == "2 samples 5ab0"
    assert fingerprint(object()) == ""
