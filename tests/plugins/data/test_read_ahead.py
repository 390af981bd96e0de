"""The thread of device-prefetch: it reads the next batches, changes no number, and ends with its run.

On a CPU, a plugin here starts it.

Modules:
    plugins/fastloop_plugins/data/_read_ahead.py
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_helpers import TINY, TINY_GPT, make_run, rows
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, default_collate
from training_runs import execute

from fastloop import Batch, Plugin, Settings, hookimpl
from fastloop.data import Loader
from fastloop.data.custom_sampler import SamplerOrder
from fastloop.errors import DataError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import ResolvedRecipe
from fastloop.run import Run
from fastloop.testing import tiny_data
from fastloop_plugins.data._read_ahead import AHEAD, ReadAheadLoader
from fastloop_plugins.data.device_prefetch import DevicePrefetch
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_plugins.data.packing import Packing
from fastloop_tools.sweep.folds import Folds

NAME = "fastloop-batches"


class Ahead(Plugin):
    """Reads in a thread if ``thread`` is true. Records every loss, and the thread of each batch of each split."""

    name = "ahead"

    def __init__(self, thread: bool = True) -> None:
        super().__init__()
        self.thread = thread
        self.threads: dict[str, list[str]] = {}
        self.losses: list[float] = []

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"thread_loader_class": ReadAheadLoader} if self.thread else {}

    @hookimpl(wrapper=True)
    def build_collator(self, split: str) -> Generator[None, Any, Any]:
        return Recorded((yield), self.threads.setdefault(split, []))

    @hookimpl
    def after_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())


class Recorded:
    """A collator that records the thread of each call."""

    def __init__(self, collate: Callable[[list[Any]], Any], threads: list[str]) -> None:
        self.collate, self.threads = collate, threads
        self.deterministic = getattr(collate, "deterministic", False)

    def __call__(self, samples: list[Any]) -> Any:
        self.threads.append(threading.current_thread().name.rpartition("_")[0] or "main")
        return self.collate(samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collate, name)


@pytest.fixture(autouse=True)
def _no_thread_remains():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


CLASSES = ("text-classification", TINY, {"label": "label"})
WORK: dict[str, tuple[tuple[str, dict[str, Any], dict[str, Any]], tuple[type[Plugin], ...]]] = {
    "padded": (CLASSES, ()),
    "packed": (CLASSES, (Packing,)),
    "grouped": (CLASSES, (LengthBucketing,)),
    "packed and grouped": (CLASSES, (Packing, LengthBucketing)),
    "folds": (CLASSES, (partial(Folds, number=1, of=3),)),  # type: ignore[dict-item]
    "blocks": (("causal-lm", TINY_GPT, {"max_length": 8}), ()),
}


def make(work: str, ahead: Ahead, **train: Any) -> Run:
    """A run with dropout on 40 texts, in micro-batches of 4."""
    import json

    (task, config, data), plugins = WORK[work]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    data = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": 16} | data
    objects = [*(cls() for cls in plugins), ahead]
    train = {"micro_batch_size": 4, "evaluate_every": 2, "epochs": 2} | train
    return make_run(task, {"config": config, "tokenizer": {"kind": "word"}}, data, objects, **train)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.unwrap_model().state_dict().items()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("work", list(WORK))
def test_a_thread_changes_no_number(work: str) -> None:
    results = []
    for thread in (False, True):
        shutil.rmtree("run", ignore_errors=True)
        ahead = Ahead(thread)
        run = make(work, ahead)
        summary = execute(run)
        results.append((ahead.losses, weights(run), summary["validation"]))
    (losses, plain, metrics), (ahead_losses, ahead_weights, ahead_metrics) = results
    assert ahead_losses == losses
    assert ahead_metrics == metrics
    assert_equal(ahead_weights, plain)


def test_the_training_thread_collates_only_the_first_batch_of_a_pass() -> None:
    """One batch of ten, on CUDA without workers."""
    counts = []
    for thread in (False, True):
        shutil.rmtree("run", ignore_errors=True)
        ahead = Ahead(thread)
        execute(make("padded", ahead, epochs=1, evaluate_every="epoch"))
        counts.append([(len(names), names.count("main")) for names in ahead.threads.values()])
    assert counts[0] == [(10, 10), (11, 11)]
    assert counts[1][0] == (10, 1)
    assert counts[1][1][1] == 2, "an evaluation, and the check of the metrics, which reads one batch"


def test_a_run_resumes_within_an_epoch_with_the_same_numbers() -> None:
    whole = Ahead()
    run = make("packed and grouped", whole)
    execute(run)
    expected = weights(run)
    shutil.rmtree("run")
    first, rest = Ahead(), Ahead()
    execute(make("packed and grouped", first, max_steps=3, save_every=3))
    again = make("packed and grouped", rest)
    resumed = build(ResolvedRecipe(again.recipe, again.plugins), resume=Path("run"))
    execute(resumed)
    assert first.losses + rest.losses == whole.losses
    assert_equal(weights(resumed), expected)


class Values(Dataset[Any]):
    """The tiny data, whose samples follow from their index."""

    deterministic = True

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 67

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return tiny_data()[index]


class Augmented(Values):
    """Draws from global random states."""

    deterministic = False

    def __getitem__(self, index: int) -> Any:
        inputs, target = tiny_data()[index]
        return inputs + 0.1 * torch.randn(8) + 0.1 * np.float32(np.random.rand()), target


class Deterministic(Plugin):
    """Declares the collator to be deterministic."""

    name = "deterministic"

    @hookimpl(wrapper=True)
    def build_collator(self) -> Generator[None, Any, Any]:
        collate = Recorded((yield), [])
        collate.deterministic = True
        return collate


@pytest.mark.parametrize("plugins", [[], [Deterministic]], ids=["neither", "the collator alone"])
def test_random_samples_are_read_in_the_training_thread(tiny_run, plugins) -> None:
    plain = tiny_run([cls() for cls in plugins], data=Augmented())
    ahead = Ahead()
    result = tiny_run([*(cls() for cls in plugins), ahead], data=Augmented())
    assert result.losses == plain.losses
    assert set(ahead.threads["train"]) == {"main"}


def load(dataset: Any, collate: Any = None, thread: bool = True, **options: Any) -> Loader:
    collate = Recorded(collate or default_collate, [])
    collate.deterministic = True
    settings = Settings(thread_loader_class=ReadAheadLoader if thread else None)
    options = {"rank": 0, "world_size": 1, "batch_size": 8, "micro_batch_size": 2, "seed": 3, "shuffle": True} | options
    return Loader(dataset, collate, settings, **options)


def facts(loader: Loader, epoch: int = 0, start: int = 0) -> list[Any]:
    """The fields of each batch that the loop reads."""
    return [(batch.ids, batch.samples, batch.is_last_micro_batch) for batch in loader.batches(epoch, start)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_process_reads_its_batches(world: int) -> None:
    for rank in range(world):
        plain, ahead = (load(Values(), thread=thread, rank=rank, world_size=world) for thread in (False, True))
        for epoch, start in ((0, 0), (1, 16)):
            assert facts(ahead, epoch, start) == facts(plain, epoch, start)
        ahead.close()


def test_an_iterable_dataset_is_read_in_the_training_thread() -> None:
    class Stream(IterableDataset[Any]):
        deterministic = True

        def __iter__(self) -> Any:
            return iter(tiny_data())

    loader = load(Stream())
    assert len(list(loader.batches())) == 34
    assert loader.loader.thread is None


def test_a_users_sampler_draws_in_the_training_thread() -> None:
    """It changes global random states while it draws, and restores them."""
    drawn = []

    class Observed(RandomSampler):
        def __iter__(self) -> Any:
            drawn.append(threading.current_thread() is threading.main_thread())
            return super().__iter__()

    data = Values()
    order = SamplerOrder(Observed(data, replacement=True), "train", seed=0)
    loader = load(data, sampler=BatchSampler(order, 8, False))
    drawn.clear()
    assert sum(batch.samples for batch in loader.batches(epoch=1)) == 67
    assert drawn
    assert all(drawn)
    loader.close()


def test_the_thread_is_a_few_batches_ahead_at_most() -> None:
    data = Values()
    loader = load(data)
    for number, step in enumerate(loader.steps(), 1):
        time.sleep(0.01)
        assert data.reads <= 2 * (number * len(step) + AHEAD)
        if number == 2:
            break
    loader.close()
    assert 16 < data.reads <= 2 * (8 + AHEAD)


def test_an_abandoned_pass_does_not_disturb_the_next_one() -> None:
    loader, plain = load(Values()), load(Values(), thread=False)
    abandoned = loader.batches()
    next(abandoned)
    assert facts(loader, epoch=1) == facts(plain, epoch=1)
    loader.close()
    assert facts(loader) == facts(plain), "a closed loader starts again"
    loader.close()


class Broken(Values):
    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise ValueError("sample 40 is broken")
        return super().__getitem__(index)


def refuse(samples: list[Any]) -> Any:
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("odd shapes")
    return default_collate(samples)


@pytest.mark.parametrize(
    ("data", "collate", "message"),
    [
        (Broken, None, r"ValueError: sample 40 is broken \(.*test_read_ahead.py:\d+"),
        (Values, refuse, r"ValueError: odd shapes \(.*test_read_ahead.py:\d+"),
    ],
    ids=["dataset", "collator"],
)
def test_an_error_of_the_thread_is_raised_with_its_line(data: Any, collate: Any, message: str) -> None:
    loader = load(data(), collate)
    with pytest.raises(DataError, match=message):
        list(loader.batches())
    loader.close()


def test_a_failed_run_ends_its_thread(tiny_run) -> None:
    ahead = Ahead()
    with pytest.raises(DataError, match="sample 40 is broken"):
        tiny_run([Deterministic(), ahead], data=Broken())
    assert NAME in ahead.threads["train"]


class Stops(Plugin):
    """Raises in the fourth step."""

    name = "stops"

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        if run.state.step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_ends_its_thread(tiny_run) -> None:
    ahead = Ahead()
    with pytest.raises(KeyboardInterrupt):
        tiny_run([Deterministic(), ahead, Stops()], data=Values())
    assert NAME in ahead.threads["train"]


def test_a_run_that_stops_within_an_epoch_ends_its_thread(tiny_run) -> None:
    ahead = Ahead()
    assert len(tiny_run([Deterministic(), ahead], data=Values(), max_steps=3).losses) == 3
    assert NAME in ahead.threads["train"]


def test_device_prefetch_starts_the_thread_on_cuda_alone() -> None:
    for kind, expected in (("cuda", ReadAheadLoader), ("cpu", None)):
        plugin = DevicePrefetch()
        plugin.kind = kind
        assert plugin.configure(Settings()).get("thread_loader_class") is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_page_locked_memory_is_used_again(tiny_run) -> None:
    """Torch's allocator allocates almost none after the first steps: another block is needed if the device is late."""

    class Allocations(Plugin):
        name = "allocations"
        counts: list[int] = []

        @hookimpl
        def after_step(self) -> None:
            self.counts.append(torch.cuda.host_memory_stats()["num_host_alloc"])

    plugin = Allocations()
    tiny_run([Deterministic(), DevicePrefetch(), plugin], data=Values(), epochs=8)
    half = len(plugin.counts) // 2
    assert plugin.counts[-1] - plugin.counts[half] <= 2 < half
