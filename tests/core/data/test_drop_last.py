"""``train.drop_last``: the last step of a training epoch that is not full is left out, for each kind of dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fastloop import Trainer
from fastloop.testing import ProcessResult, tiny_data, tiny_model

SIZE = 21
BATCH = 4
FULL = 20


class Stream(IterableDataset[Any]):
    """Gives its samples in order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_data(SIZE))


class Sized(Stream):
    """States its length."""

    def __len__(self) -> int:
        return SIZE


class Ranges(Sized):
    """Reads by position."""

    def read_ranges(self, epoch: int, ranges: Iterable[range]) -> Iterator[list[tuple[int, Any]]]:
        data = tiny_data(SIZE)
        for positions in ranges:
            yield [(position, data[position]) for position in positions]


KINDS: dict[str, Callable[[], Any]] = {
    "map-style": lambda: DataLoader(tiny_data(SIZE), batch_size=BATCH),
    "list of batches": lambda: list(DataLoader(tiny_data(SIZE), batch_size=BATCH)),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "stream with a length": lambda: DataLoader(Sized(), batch_size=BATCH),
    "ranges": lambda: DataLoader(Ranges(), batch_size=BATCH),
}
KNOWN = {"map-style", "list of batches", "stream with a length", "ranges"}


def trainer(kind: str, *plugins: Any, **settings: Any) -> Trainer:
    usual = {"optimizer": "SGD", "lr": 0.1, "epochs": 2, "device": "cpu", "output": "run", "drop_last": True}
    return Trainer(
        tiny_model(dropout=0.0),
        KINDS[kind](),
        tiny_data(SIZE),
        plugins=[{"log": False}, {"progress": False}, *plugins],
        loss=cross_entropy,
        **usual | settings,
    )


def by_hand() -> dict[str, Tensor]:
    """The weights of a loop with ``DataLoader(drop_last=True)``."""
    model = tiny_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in DataLoader(tiny_data(SIZE), batch_size=BATCH, drop_last=True):
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def loss_of_all(model: nn.Module) -> float:
    inputs, targets = TensorDataset(*tiny_data(SIZE).tensors).tensors
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(inputs), targets).item()


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_leaves_the_last_step_out_and_evaluation_keeps_all(kind, settings):
    made = trainer(kind, **settings)
    summary = made.fit()
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (2 * FULL // BATCH, 2, 2 * FULL)
    assert made.run.total_steps == (2 * FULL // BATCH if kind in KNOWN else None)
    torch.testing.assert_close(made.task.model.state_dict(), by_hand(), rtol=1e-5, atol=1e-6)
    assert summary["validation"]["loss"] == pytest.approx(loss_of_all(made.task.model))


@pytest.mark.parametrize("cut", [5, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_leaves_out_the_same_steps(kind, cut):
    trainer(kind, max_steps=cut, epochs=2).fit()
    resumed = trainer(kind, resume=True)
    summary = resumed.fit()
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (2 * FULL // BATCH, 2, 2 * FULL)
    torch.testing.assert_close(resumed.task.model.state_dict(), by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_a_schedule_ends_with_the_last_full_step(kind):
    made = trainer(kind, {"lr-scheduler": {"schedule": "linear"}})
    made.fit()
    assert made.run.optimizer.param_groups[0]["lr"] == 0.0


def of_processes() -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        made = trainer(kind, "ddp", output=f"run-{kind}")
        summary = made.fit()
        found[kind] = summary["steps"], summary["samples"], made.task.model.state_dict()
    return found


@pytest.mark.slow
def test_several_processes_leave_out_the_same_steps(processes: Callable[..., list[ProcessResult]]):
    for process in processes(2, of_processes):
        for steps, samples, weights in process.result.values():
            assert (steps, samples) == (2 * FULL // BATCH, 2 * FULL)
            torch.testing.assert_close(weights, by_hand(), rtol=1e-5, atol=1e-6)
