"""The plugin ``dataloader-workers``: real worker processes, the same numbers.

Modules:
    core/fastloop/runtime/forks.py
    plugins/fastloop_plugins/data/dataloader_workers.py
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from standard_input import read_by_a_thread
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastloop import Batch, CheckpointError, FastloopError, Plugin, hookimpl
from fastloop.runtime import platform_support
from fastloop.testing import expect_problem, tiny_data

# a machine with fewer processors than workers
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def workers(number: int, **options):
    return {"dataloader-workers": {"num_workers": number, **options}}


class Ids(Plugin):
    """The ids of the samples of every step, which the datasets of this file put into the first feature."""

    name = "ids"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    @hookimpl(wrapper=True)
    def compute_loss(self, model, batch):
        if model.training:
            self.steps.append(batch[0][:, 0].int().tolist())
        return (yield)


class Stream(IterableDataset):
    """45 samples; shares them out over workers itself when asked to, as PyTorch's documentation shows."""

    def __init__(self, shares: bool = False) -> None:
        self.shares = shares

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if self.shares and info is not None else (0, 1)
        for index in range(first, 45, stride):
            inputs = torch.zeros(8)
            inputs[0] = index
            yield inputs, index % 3


class Augmented(Dataset):
    """Draws from all three random states in ``__getitem__``."""

    def __len__(self) -> int:
        return 67

    def __getitem__(self, index: int):
        inputs, target = tiny_data()[index]
        return inputs + 0.1 * torch.randn(8) + 0.1 * np.float32(np.random.rand()) + 0.1 * random.random(), target


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_numbers(tiny_run):
    alone = tiny_run()
    for options in (workers(1), workers(3), workers(2, persistent_workers=False, prefetch_factor=1)):
        result = tiny_run([options], micro_batch_size=None)
        assert result.losses == alone.losses
        assert all(torch.equal(result.weights[name], alone.weights[name]) for name in alone.weights)


@pytest.mark.slow
def test_random_augmentation_is_the_same_for_any_number_of_workers_from_one_on(tiny_run):
    one, three = tiny_run([workers(1)], data=Augmented()), tiny_run([workers(3)], data=Augmented())
    assert one.losses == three.losses
    assert one.losses[0] != one.losses[9]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "shares itself out"])
def test_of_an_iterable_dataset_every_sample_comes_once_an_epoch_in_the_same_batches(tiny_run, shares):
    seen = []
    for number in (0, 1, 2, 3):
        ids = Ids()
        tiny_run([workers(number), ids], data=Stream(shares))
        seen.append(ids.steps)
        epoch = [sample for step in ids.steps[:6] for sample in step]
        assert sorted(epoch) == list(range(45))
        assert len(ids.steps) == 12, "two epochs of six steps, through the same persistent workers"
    assert seen[1:] == seen[:1] * 3


def test_a_dataset_that_says_it_shards_itself_is_taken_at_its_word(tiny_run):
    stream, ids = Stream(shares=True), Ids()
    stream.shards_itself = True
    tiny_run([workers(2), ids], data=stream, epochs=1)
    assert sorted(sample for step in ids.steps for sample in step) == list(range(45))


@pytest.mark.slow
def test_a_dataset_that_shards_itself_is_resumed_at_an_epochs_end_only(tiny_run):
    stream = Stream(shares=True)
    stream.shards_itself = True
    tiny_run([workers(2)], data=stream, epochs=1, output="run", max_steps=3)
    with expect_problem("resume-impossible 24", CheckpointError):
        tiny_run([workers(2)], data=stream, epochs=2, output="run", resume=True)
    tiny_run([workers(2)], data=stream, epochs=1, output="other")
    assert tiny_run([workers(2)], data=stream, epochs=2, output="other", resume=True).summary["epochs"] == 2


class Breaks(Dataset):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 67

    def __getitem__(self, index: int):
        if index == 13 and get_worker_info() is not None:
            if self.how == "raises":
                raise ValueError("sample 13 is broken")
            if self.how == "hangs":
                time.sleep(600)
            if self.how == "leaves files open":
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                files = []
                while True:
                    files.append(Path(__file__).open())  # noqa: SIM115 # the leak
            if self.how == "is interrupted":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGKILL)
        return tiny_data()[index]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", "reading-failed ValueError: sample 13 is broken"),
        pytest.param(
            "leaves files open",
            "reading-failed OSError Too many open files test_dataloader_workers.py __getitem__",
            marks=pytest.mark.slow,
        ),
        ("is killed", "worker-killed 2 SIGKILL"),
        pytest.param("is interrupted", "worker-killed 2 exit code 0", marks=pytest.mark.slow),
        pytest.param("hangs", "worker-hangs 2", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_fails_ends_the_run_with_its_error(tiny_run, how, expected):
    with expect_problem(expected, FastloopError) as caught:
        tiny_run([workers(2, timeout=2 if how == "hangs" else 300)], data=Breaks(how))
    has_cause = caught.value.__cause__ is not None  # the command line prints its traceback
    assert has_cause == (how in {"raises", "leaves files open"}), "the error of a worker that ended is one of torch"


class EndsEarly(IterableDataset):
    """The share of the first worker has one batch; the second worker fails in its tenth one."""

    shards_itself = True

    def __init__(self, is_killed: bool) -> None:
        self.is_killed = is_killed

    def __iter__(self):
        for number in range(8 if get_worker_info().id == 0 else 200):
            if number == 80 and self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 80:
                raise ValueError("row 80 is bad")
            yield torch.zeros(8), 0


@pytest.mark.parametrize(
    ("is_killed", "expected"),
    [
        (False, "reading-failed ValueError: row 80 is bad test_dataloader_workers.py __iter__"),
        (True, "worker-killed worker 1 SIGKILL"),
    ],
    ids=["raises", "is killed"],
)
def test_a_worker_whose_share_ended_is_not_blamed_for_an_error(tiny_run, is_killed, expected):
    with expect_problem(expected, FastloopError) as caught:
        tiny_run([workers(2, persistent_workers=False)], data=EndsEarly(is_killed), epochs=1)
    assert (caught.value.__cause__ is None) == is_killed


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_start_while_a_thread_reads_standard_input(tiny_run, monkeypatch):
    plain = tiny_run()
    with read_by_a_thread(monkeypatch):
        losses = tiny_run([workers(1, timeout=20)]).losses
    assert losses == plain.losses


@pytest.mark.slow
def test_no_worker_outlives_the_run(tiny_run):
    before = set(psutil.Process().children(recursive=True))
    tiny_run([workers(2)])
    deadline = time.monotonic() + 120
    while (left := set(psutil.Process().children(recursive=True)) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.mark.slow
def test_auto_leaves_a_processor_to_training(tiny_run):
    run = tiny_run(["dataloader-workers"], epochs=1).trainer.run
    assert run.settings.num_workers == max(0, min(platform_support.cores() - 1, 8))
    assert run.settings.pin_memory == torch.cuda.is_available()


class Unsendable(Plugin):
    """Makes batches that no process can send to another, or raises an error that cannot be sent."""

    name = "unsendable"

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises

    @hookimpl
    def build_collator(self):
        class LocalError(Exception):
            pass

        def collate(samples):
            if self.raises:
                raise LocalError("sample 7 is odd")
            return Batch(lambda: samples)

        return collate


@pytest.mark.parametrize(("raises", "message"), [(False, "pickle"), (True, "sample 7 is odd")], ids=["batch", "error"])
def test_what_a_worker_cannot_send_ends_the_run_with_the_error(tiny_run, raises, message):
    with expect_problem(f"reading-failed RuntimeError {message}", FastloopError):
        tiny_run([workers(1), Unsendable(raises)])
