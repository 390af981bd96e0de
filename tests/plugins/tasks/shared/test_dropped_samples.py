"""Collators that leave samples out: steps and evaluations are means over the samples that are left."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fastloop import Batch, PluginError, Settings, Trainer
from fastloop.data import Loader
from fastloop.errors import DataError
from fastloop.testing import ProcessResult
from fastloop_plugins.tasks.shared.collate import TargetCounter, count_samples, values_and_targets

SIZE = 41
INPUTS = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))
CLASSES = INPUTS[:, :3].argmax(1)


def keeps(index: int) -> bool:
    """Few of the first samples, and most of the later ones: parts of a step keep different numbers of samples. The last
    micro-step begins with samples that are left out."""
    if index >= SIZE - 3:
        return index == SIZE - 1
    return index % 4 == 1 if index < 20 else index % 7 != 0


KEPT = [index for index in range(SIZE) if keeps(index)]


class Samples(Dataset[Any]):
    """``(inputs, target)``, or None for a sample to leave out."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.make(index) if keeps(index) else None


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.samples = Samples(make)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(SIZE))


def skip_none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def skip_none_in_batch(samples: list[Any]) -> Batch:
    """As a collator that counts itself."""
    kept = [sample for sample in samples if sample is not None]
    return Batch(default_collate(kept), samples=len(kept))


class Regressor(nn.Module):
    """Computes its own loss of a mapping."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        wanted = x.sum(1, keepdim=True) if labels is None else labels
        return {"loss": functional.mse_loss(self.layer(x), wanted)}


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def regressor() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def pair(index: int) -> Any:
    return INPUTS[index], INPUTS[index, :1] * 3


def class_pair(index: int) -> Any:
    return INPUTS[index], CLASSES[index]


def two_targets(index: int) -> Any:
    return INPUTS[index], (INPUTS[index, :1], INPUTS[index, 1:2])


def loss_of_two(predictions: Tensor, targets: list[Tensor]) -> Tensor:
    return functional.mse_loss(predictions, targets[0]) + functional.mse_loss(predictions, targets[1])


def labelled(index: int) -> Any:
    return {"x": INPUTS[index], "labels": INPUTS[index, :1] * 3}


def unlabelled(index: int) -> Any:
    return {"x": INPUTS[index]}


CASES: dict[str, tuple[Callable[[int], Any], Callable[[], nn.Module], Any]] = {
    "mean squared error": (pair, regressor, functional.mse_loss),
    "cross entropy": (class_pair, classifier, functional.cross_entropy),
    "a function of one's own": (class_pair, classifier, lambda scores, y: functional.cross_entropy(scores, y)),
    "two targets": (two_targets, regressor, loss_of_two),
    "a mapping with labels": (labelled, Regressor, None),
    "a mapping without labels": (unlabelled, Regressor, None),
}


def loss_of_kept(name: str, model: nn.Module) -> Tensor:
    """The loss of a hand-written loop for all samples at once."""
    make, _, loss = CASES[name]
    batch = default_collate([make(index) for index in KEPT])
    if loss is None:
        result: Tensor = model(**batch)["loss"]
        return result
    inputs, targets = batch
    value: Tensor = loss(model(inputs), targets)
    return value


def stepped(name: str) -> dict[str, Tensor]:
    """The weights after one step of a hand-written loop."""
    model = CASES[name][1]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of_kept(name, model).backward()
    optimizer.step()
    return model.state_dict()


def trainer(name: str, *plugins: Any, data: Any = None, collate: Any = skip_none, **settings: Any) -> Trainer:
    make, model, loss = CASES[name]
    dataset = data or Samples(make)
    settings = {"optimizer": "SGD", "lr": 0.1, "epochs": 1, "device": "cpu", "output": "run"} | settings
    return Trainer(
        model(),
        DataLoader(dataset, batch_size=45, collate_fn=collate),
        DataLoader(dataset, batch_size=9, collate_fn=collate),
        plugins=[{"log": False}, {"progress": False}, *plugins],
        loss=loss,
        **settings,
    )


@pytest.mark.parametrize("collate", [skip_none, skip_none_in_batch])
@pytest.mark.parametrize("name", CASES)
def test_steps_and_evaluations_are_means_over_the_samples_that_are_left(name, collate):
    found = trainer(name, collate=collate, micro_batch_size=9)
    assert found.validate()["loss"] == pytest.approx(loss_of_kept(name, found.task.model).item(), rel=1e-6)
    summary = found.fit()
    torch.testing.assert_close(found.task.model.state_dict(), stepped(name), rtol=1e-5, atol=1e-6)
    assert (summary["samples"], summary["epochs"], summary["steps"]) == (len(KEPT), 1, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_counted_likewise(workers):
    name = "mean squared error"
    data = Stream(CASES[name][0])
    summary = trainer(name, {"dataloader-workers": {"num_workers": workers}}, data=data, micro_batch_size=9).fit()
    assert (summary["samples"], summary["epochs"]) == (len(KEPT), 1)
    assert trainer(name, data=data).validate()["loss"] == pytest.approx(loss_of_kept(name, regressor()).item())


def test_a_resumed_run_continues_after_the_samples_that_were_drawn():
    name = "mean squared error"
    data = Samples(CASES[name][0])

    def make(**settings: Any) -> Trainer:
        loader = DataLoader(data, batch_size=5, shuffle=True, collate_fn=skip_none)
        settings = {"optimizer": "SGD", "lr": 0.1, "epochs": 2, "device": "cpu", "seed": 3} | settings
        return Trainer(
            regressor(), loader, plugins=[{"log": False}, {"progress": False}], loss=functional.mse_loss, **settings
        )

    whole = make(output="whole")
    assert whole.fit()["samples"] == 2 * len(KEPT)
    make(output="run", max_steps=5).fit()
    resumed = make(output="run", resume=True)
    assert resumed.fit()["samples"] == 2 * len(KEPT)
    expected = whole.task.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in resumed.task.model.state_dict().items())


def test_an_audit_counts_the_samples_that_were_drawn():
    name = "mean squared error"
    for data in (None, Stream(CASES[name][0])):
        summary = trainer(name, "sample-audit", data=data, micro_batch_size=9, output=f"run-{data is None}").fit()
        assert summary["sample-audit"]["samples"] == SIZE
        assert summary["sample-audit"]["missing"] == summary["sample-audit"]["unknown"] == 0


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Samples, Stream])
@pytest.mark.parametrize(("micro", "world"), [(9, 1), (5, 2), (10, 4), (38, 2)])
def test_processes_share_the_samples_and_fill_the_last_step_with_one_that_is_left(kind, micro, world):
    """With micro-batches of 38 samples, the last one has samples 38, 39 and 40, of which only 40 is left."""
    shares = []
    for rank in range(world):
        collate = TargetCounter(skip_none, functional.mse_loss)
        loader = Loader(
            kind(pair), collate, Settings(), batch_size=micro * world, micro_batch_size=micro, rank=rank,
            world_size=world, seed=0, shuffle=False,
        )  # fmt: skip
        shares.append(list(loader.batches()))
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert sum(batch.samples for batch in batches) == len(KEPT)
    assert sum(batch.drawn for batch in batches) == SIZE
    assert all(batch.loss_weight == batch.samples for batch in batches)
    assert all(len(batch.inputs[0]) >= max(batch.samples, 1) for batch in batches)


def of_processes() -> Any:
    name = "mean squared error"
    found = trainer(name, "ddp", batch_size=38, micro_batch_size=19, epochs=2)
    evaluated = found.validate()["loss"]
    summary = found.fit()
    return evaluated, summary["samples"], found.task.model.state_dict()


@pytest.mark.slow
def test_several_processes_train_as_one(processes: Callable[..., list[ProcessResult]]):
    ended = processes(2, of_processes)
    alone = trainer("mean squared error", batch_size=38, epochs=2, output="alone")
    expected = alone.validate()["loss"]
    summary = alone.fit()
    for process in ended:
        evaluated, samples, weights = process.result
        assert evaluated == pytest.approx(expected)
        assert samples == summary["samples"] == 2 * len(KEPT)
        torch.testing.assert_close(weights, alone.task.model.state_dict(), rtol=1e-5, atol=1e-6)


# -- what cannot be counted --------------------------------------------------------------------------------------------


def test_predictions_are_refused():
    with pytest.raises(PluginError, match="Subset"):
        trainer("mean squared error").predict(DataLoader(Samples(pair), batch_size=9, collate_fn=skip_none))


@pytest.mark.parametrize("collate", [lambda samples: None, lambda samples: (torch.zeros(0, 4), torch.zeros(0, 1))])
def test_a_micro_batch_without_a_sample_is_an_error(collate):
    with pytest.raises(DataError, match="Subset"):
        trainer("mean squared error", collate=collate).fit()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("inputs", "samples"),
    [
        ((zeros(32, 8), zeros(32)), 32),
        ((zeros(29, 8), zeros(29)), 29),
        ((zeros(40, 8), zeros(40, 2)), 40),
        ([[zeros(29, 8), zeros(29, 3)], zeros(29)], 29),
        ((zeros(29, 8), [zeros(29), zeros(29, 2)]), 29),
        ((zeros(5, 32, 8), zeros(5, 32)), 32),
        ((zeros(50, 32, 8), zeros(117)), 32),
        (([zeros(3, 9, 9)] * 32, [{"boxes": zeros(2, 4)}] * 32), 32),
        ({"input_ids": zeros(29, 7), "attention_mask": zeros(29, 7), "labels": zeros(29)}, 29),
        ({"input_ids": zeros(29, 7), "attention_mask": zeros(29, 7)}, 29),
        ({"images": [zeros(3, 9, 9)] * 32}, 32),
        ({"x": zeros(117, 8), "edges": zeros(2, 300), "labels": zeros(32)}, 32),
        ({"x": zeros(117, 8), "edges": zeros(2, 300), "labels": zeros(117)}, 117),
        (zeros(29, 8), 32),
        (None, 0),
    ],
)
def test_samples_are_counted_by_the_targets_or_by_a_length_that_all_tensors_have(inputs, samples):
    assert count_samples(*values_and_targets(inputs), 32) == samples


def test_a_counter_can_be_sent_to_a_spawned_worker():
    counter = TargetCounter(skip_none, lambda scores, targets: scores.mean())
    copied = pickle.loads(pickle.dumps(counter))
    assert copied([pair(0), None]).samples == 1
