"""Data that is no ``DataLoader``: iterators, lists of batches, and iterables that end early.

Modules:
    plugins/fastloop_tools/trainer/batch_list.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training_runs import execute

from fastloop import Trainer, UsageError
from fastloop.errors import DataError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import ProcessResult, expect_problem
from fastloop_tools.trainer.batch_list import kind_of_elements

INPUTS = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :1] * 3


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def batches(size: int = 20, rows: int = 100) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, rows, size):
        yield INPUTS[:rows][first : first + size], TARGETS[:rows][first : first + size]


def samples() -> list[tuple[Tensor, Tensor]]:
    return [(INPUTS[index], TARGETS[index]) for index in range(100)]


def trainer(train_loader: Any, *others: Any, **settings: Any) -> Trainer:
    usual: dict[str, Any] = {"optimizer": "SGD", "lr": 0.1, "epochs": 3, "device": "cpu", "output": "run"}
    plugins = [{"log": False}, {"progress": False}, *settings.pop("plugins", ())]
    return Trainer(network(), train_loader, *others, plugins=plugins, loss=mse_loss, **usual | settings)


# -- iterators ---------------------------------------------------------------------------------------------------------

ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": batches,
    "generator expression": lambda: (sample for sample in samples()),
    "zip": lambda: zip(INPUTS, TARGETS, strict=True),
    "map": lambda: map(tuple, samples()),
    "iterator of a list": lambda: iter(samples()),
    "iterator of a loader": lambda: iter(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=20)),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "train_loader": trainer,
    "train_loader with a batch size": lambda data: trainer(data, batch_size=20),
    "eval_loader": lambda data: trainer(list(batches()), data),
    "test_loader": lambda data: trainer(list(batches()), None, data),
    "validate": lambda data: trainer(list(batches())).validate(data),
    "predict": lambda data: trainer(list(batches())).predict(data),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_is_refused_before_anything_is_written(kind, place):
    with expect_problem("wrong-dataset IterableDataset", UsageError):
        PLACES[place](ITERATORS[kind]())
    assert not Path("run").exists()


MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
X = torch.randn(40, 4)
whole = TensorDataset(X, X[:, :1])
class Empty(IterableDataset):
    def __iter__(self): return iter(())
class Once(IterableDataset):
    def __init__(self): self.rows = iter(whole)
    def __iter__(self): return self.rows
FORMS = {
    "iterator": lambda: iter(whole),
    "generator": lambda: (row for row in whole),
    "loader": lambda: DataLoader(whole, batch_size=8),
    "empty": Empty,
    "once": Once,
}
def net(): return nn.Linear(4, 1)
def data(split, form):
    return {"train": whole, "validation": whole, "test": whole} | {split: FORMS[form]()}
"""


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("form", ["iterator", "generator", "loader", "empty", "once"])
def test_a_recipes_datasets_are_checked_likewise(form, split, tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    recipe = make_recipe(
        {
            "model": {"module": f"{tmp_path}/own.py:net"},
            "data": {"module": f"{tmp_path}/own.py:data", "arguments": {"split": split, "form": form}},
            "train": {"batch_size": 8, "epochs": 2, "device": "cpu"},
            "plugins": [{"module": {"loss": "mse_loss"}}, {"log": False}, {"progress": False}],
            "output": str(tmp_path / "run"),
        }
    )
    if form in ("empty", "once"):
        if (form, split) == ("once", "test"):
            return  # it is read once
        with expect_problem(f"empty-split {split}", DataError):
            execute(build(resolve(recipe)))
        return
    with expect_problem(f"wrong-dataset data: {split}", UsageError):
        build(resolve(recipe))


# -- epochs without a sample -------------------------------------------------------------------------------------------


class Once(IterableDataset[Any]):
    """Returns the same iterator each time: the second epoch is empty."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = iter(rows)

    def __iter__(self) -> Iterator[Any]:
        return self.rows


@pytest.mark.parametrize("settings", [{"epochs": 3}, {"epochs": None, "max_steps": 12}], ids=str)
@pytest.mark.parametrize("rows", [0, 100])
def test_an_epoch_without_a_sample_is_an_error(rows, settings):
    made = trainer(Once(samples()[:rows]), batch_size=20, **settings)
    with expect_problem("empty-split train", DataError):
        made.fit()
    assert made.run.state.step == rows // 20


@pytest.mark.parametrize("rows", [0, 19])
def test_a_stream_of_which_drop_last_leaves_no_step_is_an_error(rows):
    data = DataLoader(Once(samples()[:rows]), batch_size=20, drop_last=True)
    with expect_problem("empty-split train.drop_last", DataError):
        trainer(data).fit()


def test_an_evaluation_without_a_sample_is_an_error():
    made = trainer(list(batches()), Once(samples()))
    assert made.validate()["loss"] > 0
    with expect_problem("empty-split validation", DataError):
        made.validate()
    with expect_problem("empty-split validation", DataError):
        made.fit()


# -- lists of batches --------------------------------------------------------------------------------------------------


def trained_by_hand(size: int, rows: int, epochs: int = 3) -> dict[str, Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, targets in batches(size, rows):
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


FORMS: dict[str, Callable[[Any], Any]] = {
    "list of tuples": list,
    "tuple of lists": lambda found: tuple(list(batch) for batch in found),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("size", "rows", "settings"), [(20, 100, {}), (30, 100, {}), (20, 100, {"micro_batch_size": 5})]
)
def test_a_list_of_batches_gives_the_steps_of_a_loop(form, size, rows, settings):
    made = trainer(FORMS[form](batches(size, rows)), FORMS[form](batches(7, 50)), **settings)
    summary = made.fit()
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (3 * -(-rows // size), 3, 3 * rows)
    torch.testing.assert_close(made.task.model.state_dict(), trained_by_hand(size, rows), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        expected = mse_loss(made.task.model(INPUTS[:50]), TARGETS[:50]).item()
    assert summary["validation"]["loss"] == pytest.approx(expected)
    assert len(made.predict(FORMS[form](batches(7, 50)))["output"]) == 50


def test_a_list_of_mappings_is_a_list_of_batches():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": mse_loss(self.layer(x), labels)}

    data = [{"x": inputs, "labels": targets} for inputs, targets in batches()]
    model = Own()
    Trainer(
        model, data, plugins=[{"log": False}, {"progress": False}], optimizer="SGD", lr=0.1, epochs=3, device="cpu",
        output="run",
    ).fit()  # fmt: skip
    torch.testing.assert_close(model.layer.state_dict(), trained_by_hand(20, 100), rtol=1e-5, atol=1e-6)


def test_a_list_is_one_of_samples_if_a_batch_size_is_given():
    made = trainer(samples(), samples(), batch_size=20)
    assert made.fit()["steps"] == 15
    assert trainer([(row, row) for row in INPUTS], batch_size=20).task.splits["train"].sampler is None


class Batches:
    """Begins again in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return batches()


@pytest.mark.parametrize(
    "data",
    [
        [*batches(20, 40), *batches(30, 30), *batches(20, 20)],
        [*batches(20, 40), *batches(30, 30)],
        [next(batches()), (INPUTS[:20], TARGETS[:19])],
        [(row, row) for row in INPUTS],
        [{"x": row, "labels": row} for row in INPUTS],
        Batches(),
    ],
    ids=["one differs", "a larger last one", "rows differ", "unclear pairs", "unclear mappings", "iterable"],
)
@pytest.mark.parametrize("place", ["train_loader", "eval_loader"])
def test_batches_that_cannot_be_told_or_divided_are_refused(data, place):
    with expect_problem("wrong-dataset", UsageError) as refused:
        PLACES[place](data)
    assert refused.value.problem.place == place
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("element", "kind"),
    [
        ((torch.zeros(8), 2), "samples"),
        ((torch.zeros(8), torch.tensor(2)), "samples"),
        ((torch.zeros(8), torch.zeros(1)), "samples"),
        ((torch.zeros(3, 9, 9), torch.zeros(9, 9)), "samples"),
        (torch.zeros(1, 28, 28), "samples"),
        ({"input_ids": [1, 2, 3], "labels": 1}, "samples"),
        ((torch.zeros(20, 8), torch.zeros(20)), "batches"),
        ([torch.zeros(20, 8), [torch.zeros(20), torch.zeros(20, 3)]], "batches"),
        ({"input_ids": torch.zeros(20, 7), "labels": torch.zeros(20)}, "batches"),
        ((torch.zeros(8), torch.zeros(8)), "unclear"),
        ((torch.zeros(1, 9, 9), torch.zeros(1, 9, 9)), "unclear"),
        (None, "samples"),
    ],
)
def test_samples_and_batches_are_told_apart_by_their_rows(element, kind):
    assert kind_of_elements(element) == kind


def of_processes() -> Any:
    made = trainer(list(batches()), list(batches(7, 50)), plugins=["ddp"])
    summary = made.fit()
    return summary["steps"], summary["validation"]["loss"], made.task.model.state_dict()


@pytest.mark.slow
def test_several_processes_share_each_batch(processes: Callable[..., list[ProcessResult]]):
    for process in processes(2, of_processes):
        steps, loss, weights = process.result
        torch.testing.assert_close(weights, trained_by_hand(20, 100), rtol=1e-5, atol=1e-6)
        model = network()
        model.load_state_dict(weights)
        assert (steps, loss) == (15, pytest.approx(mse_loss(model(INPUTS[:50]), TARGETS[:50]).item()))
