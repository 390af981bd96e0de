"""length-bucketing: the same samples, in batches of like length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from text_kit import TINY, make_run
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from fastloop import Batch, Plugin, PluginError, Trainer, hookimpl
from fastloop.data import StepSampler
from fastloop_plugins.ledger import Ledger
from fastloop_plugins.length_bucketing import LengthBucketing


class Rows(Dataset[Any]):
    """Sums of numbers, 1 to 30 of them."""

    def __init__(self, size: int = 203) -> None:
        self.lengths = torch.randint(1, 31, (size,), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self.lengths[index], generator=torch.Generator().manual_seed(index))


def collate(samples: list[torch.Tensor]) -> Batch:
    inputs = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return Batch((inputs.unsqueeze(-1), inputs.sum(1)), tokens=sum(map(len, samples)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(1, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).sum((1, 2))


class Shapes(Plugin):
    """The widths of the batches, and how much of them is padding."""

    name = "shapes"

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.ids: list[tuple[int, ...]] = []
        self.real = self.computed = 0

    @hookimpl
    def before_step(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.widths.append(batch.inputs[0].shape[1])
            self.ids.append(batch.ids)
            self.real += batch.tokens
            self.computed += batch.inputs[0].numel()


def train(*plugins: Any, output: str = "run", **arguments: Any) -> tuple[Shapes, dict[str, Any]]:
    shapes = Shapes()
    loader = torch.utils.data.DataLoader(arguments.pop("data", Rows()), batch_size=8, collate_fn=collate)
    evaluate = torch.utils.data.DataLoader(Rows(50), batch_size=8, collate_fn=collate)
    trainer = Trainer(
        Model(), loader, evaluate, plugins=[*plugins, shapes], loss=nn.functional.mse_loss, output=output, lr=1e-3, **arguments
    )
    return shapes, trainer.fit()


def test_little_padding_is_left_and_every_sample_comes_once():
    shapes, summary = train(LengthBucketing(window=10), Ledger(), epochs=2)
    plain, _ = train(epochs=2, output="plain")
    assert summary["ledger"]["missing"] == summary["ledger"]["repeated"] == 0
    assert summary["ledger"]["epochs"] == 2
    assert plain.computed > 1.5 * plain.real
    assert shapes.computed < 1.15 * shapes.real
    assert shapes.real == plain.real


def test_the_order_is_another_each_epoch_and_does_not_go_by_length():
    shapes, _ = train(LengthBucketing(), epochs=2)
    half = len(shapes.ids) // 2
    assert set(shapes.ids[:half]) != set(shapes.ids[half:])
    assert shapes.widths[: half - 1] != sorted(shapes.widths[: half - 1])
    assert shapes.widths[: half - 1] != sorted(shapes.widths[: half - 1], reverse=True)


def test_only_the_last_batch_is_short():
    shapes, _ = train(LengthBucketing(), epochs=1)
    assert [len(ids) for ids in shapes.ids] == [8] * 25 + [3]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_has_the_same_samples_on_any_number_of_processes(world_size):
    rows, plugin = Rows(), LengthBucketing(window=4)

    def steps(processes: int) -> list[set[int]]:
        def arrange(*arguments: Any) -> list[int]:
            return plugin.arrange(rows, *arguments)

        readers = [list(StepSampler(len(rows), 24, 24 // processes, rank, processes, 0, True, arrange)) for rank in range(processes)]
        return [set().union(*(draw for draw in draws if not draw.fills)) for draws in zip(*readers, strict=True)]

    assert steps(world_size) == steps(1)


def test_a_run_goes_on_inside_an_epoch():
    whole, _ = train(LengthBucketing(), epochs=2, output="whole")
    first, _ = train(LengthBucketing(), epochs=2, max_steps=31, save_every=1000)
    second, _ = train(LengthBucketing(), epochs=2, resume=True)
    assert first.ids + second.ids == whole.ids


def test_evaluation_has_the_same_metrics():
    still = {"max_steps": 1, "optimizer": "SGD", "weight_decay": 0.0, "clip_norm": 1e-12}
    (_, bucketed), (_, plain) = train(LengthBucketing(), **still), train(output="plain", **still)
    assert bucketed["evaluate"]["loss"] == pytest.approx(plain["evaluate"]["loss"], rel=1e-5)


def test_it_says_what_it_saves(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    train(LengthBucketing())
    assert "of what is computed is padding, instead of" in caplog.text


def test_like_lengths_are_said(caplog):
    rows = Rows()
    rows.lengths = [5] * len(rows.lengths)
    train(LengthBucketing(), data=rows)
    assert "all samples are of length 5: there is nothing to match" in caplog.text


def test_what_has_no_lengths_is_refused():
    rows = Rows()
    rows.lengths, found = None, rows.lengths
    rows.__class__ = type("Plain", (Rows,), {"__len__": lambda self: 10, "__getitem__": lambda self, index: torch.zeros(found[index])})
    with pytest.raises(PluginError, match="Plain has no lengths"):
        train(LengthBucketing(), data=rows)


def test_an_iterable_dataset_is_refused():
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Rows(20))

    with pytest.raises(PluginError, match="Stream is iterable"):
        train(LengthBucketing(), data=Stream())


def test_texts_bring_their_lengths():
    Path("a.csv").write_text("text,label\n" + "".join(f"{'good ' * (1 + i % 20)},{i % 2}\n" for i in range(64)))
    data = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}
    run = make_run("text-classification", {"config": TINY, "tokenizer": {"kind": "word"}}, data, objects=[LengthBucketing()])
    widths = [batch.inputs["input_ids"].shape[1] for batch in run.train_loader.batches()]
    assert len(set(widths)) > 3
    assert sum(batch.tokens for batch in run.train_loader.batches()) > 0.85 * sum(8 * width for width in widths)
