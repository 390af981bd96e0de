"""length-bucketing: the same samples, in batches of like length.

Modules:
    plugins/fastloop_plugins/data/length_bucketing.py
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import find_lines
from text_helpers import TINY, make_run
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from training_runs import execute

from fastloop import Batch, CheckpointError, Plugin, PluginError, Settings, Trainer, hookimpl
from fastloop.data import StepSampler
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.runtime import hardware as machine
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_plugins.data.sample_audit import SampleAudit


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
    """The widths and losses of the steps, and how much of what they compute is padding."""

    name = "shapes"

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.ids: list[tuple[int, ...]] = []
        self.steps: list[set[int]] = []
        self.losses: list[float] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.real = self.computed = 0

    @hookimpl
    def before_step(self, batches: list[Batch]) -> None:
        self.steps.append({index for batch in batches for index in batch.ids})
        for batch in batches:
            self.shapes.add(tuple(batch.inputs[0].shape[:2]))
            self.widths.append(batch.inputs[0].shape[1])
            self.ids.append(batch.ids)
            self.real += batch.tokens
            self.computed += batch.inputs[0].numel()

    @hookimpl
    def after_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())


def train(*plugins: Any, output: str = "run", **arguments: Any) -> tuple[Shapes, dict[str, Any]]:
    shapes = Shapes()
    arguments.setdefault("pad_to_multiple_of", 1)  # the same widths on each device
    loader = torch.utils.data.DataLoader(arguments.pop("data", Rows()), batch_size=8, collate_fn=collate)
    evaluate = torch.utils.data.DataLoader(Rows(50), batch_size=8, collate_fn=collate)
    trainer = Trainer(
        Model(),
        loader,
        evaluate,
        plugins=[*plugins, shapes],
        loss=nn.functional.mse_loss,
        output=output,
        lr=1e-3,
        **arguments,
    )
    return shapes, trainer.fit()


def test_little_padding_is_left_and_every_sample_comes_once():
    shapes, summary = train(LengthBucketing(window=10), SampleAudit(), epochs=2)
    plain, _ = train(epochs=2, output="plain")
    assert summary["sample-audit"]["missing"] == summary["sample-audit"]["repeated"] == 0
    assert summary["sample-audit"]["epochs"] == 2
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

        readers = [
            list(StepSampler(len(rows), 24, 24 // processes, rank, processes, 0, True, arrange))
            for rank in range(processes)
        ]
        return [set().union(*(draw for draw in draws if not draw.is_filler)) for draws in zip(*readers, strict=True)]

    assert steps(world_size) == steps(1)


def test_a_run_goes_on_inside_an_epoch():
    whole, _ = train(LengthBucketing(), epochs=2, output="whole")
    first, _ = train(LengthBucketing(), epochs=2, max_steps=31, save_every=1000)
    second, _ = train(LengthBucketing(), epochs=2, resume=True)
    assert first.ids + second.ids == whole.ids


@pytest.mark.parametrize(
    ("before", "after"), [(None, 2), (2, None), (2, 5)], ids=["added", "removed", "another-window"]
)
def test_a_run_does_not_resume_in_another_order(before, after):
    Path("a.csv").write_text("text,label\n" + "".join(f"{'good ' * (1 + i % 20)},{i % 2}\n" for i in range(64)))
    train_texts(before, None, max_steps=3, save_every=3)
    with pytest.raises(CheckpointError) as raised:
        train_texts(after, Path("run"))
    changes_option = before is not None and after is not None
    assert ("plugins.length-bucketing.window" in str(raised.value)) == changes_option
    assert ("64 drawn in the order" in str(raised.value)) != changes_option


def train_texts(window: int | None, resume: Path | None, **settings: Any) -> None:
    """Train on the texts of a.csv, with windows of that many batches; None: without length-bucketing."""
    tree = {
        "model": {"config": TINY, "tokenizer": {"kind": "word"}},
        "data": {"files": {"train": "a.csv"}, "label": "label", "max_length": 32, "validation_fraction": 0},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu"} | settings,
        "plugins": ["text-classification", *([{"length-bucketing": {"window": window}}] if window else [])],
        "output": "run",
    }
    recipe = make_recipe(tree, Path("recipe.yaml"))
    execute(build(resolve(recipe), resume=resume))


def test_evaluation_has_the_same_metrics():
    still = {"max_steps": 1, "optimizer": "SGD", "weight_decay": 0.0, "max_grad_norm": 1e-12}
    (_, bucketed), (_, plain) = train(LengthBucketing(), **still), train(output="plain", **still)
    assert bucketed["validation"]["loss"] == pytest.approx(plain["validation"]["loss"], rel=1e-5)


def test_length_bucketing_logs_saved_padding(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    train(LengthBucketing())
    (line,) = find_lines(caplog, "length-bucketing: padding")
    now, before = map(int, re.findall(r"(\d+)%", line))
    assert now < before


def test_length_bucketing_logs_equal_lengths(caplog):
    rows = Rows()
    rows.lengths = [5] * len(rows.lengths)
    train(LengthBucketing(), data=rows)
    assert_problem(caplog, "no-effect length-bucketing: 5")


def test_dataset_without_lengths_is_rejected():
    rows = Rows()
    rows.lengths, found = None, rows.lengths
    rows.__class__ = type(
        "Plain", (Rows,), {"__len__": lambda self: 10, "__getitem__": lambda self, index: torch.zeros(found[index])}
    )
    with expect_problem("no-lengths", PluginError):
        train(LengthBucketing(), data=rows)


def test_an_iterable_dataset_is_refused():
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Rows(20))

    with expect_problem("iterable-dataset train: Stream", PluginError):
        train(LengthBucketing(), data=Stream())


def test_texts_bring_their_lengths():
    Path("a.csv").write_text("text,label\n" + "".join(f"{'good ' * (1 + i % 20)},{i % 2}\n" for i in range(64)))
    data = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}
    run = make_run(
        "text-classification", {"config": TINY, "tokenizer": {"kind": "word"}}, data, objects=[LengthBucketing()]
    )
    widths = [batch.inputs["input_ids"].shape[1] for batch in run.train_loader.batches()]
    assert len(set(widths)) > 3
    assert sum(batch.tokens for batch in run.train_loader.batches()) > 0.85 * sum(8 * width for width in widths)


# -- max_tokens --------------------------------------------------------------------------------------------------------


def test_no_batch_has_more_tokens_than_allowed_and_steps_train_the_same():
    plain, _ = train(LengthBucketing(), batch_size=24, epochs=2, output="plain")
    shapes, summary = train(LengthBucketing(max_tokens=64), SampleAudit(), batch_size=24, epochs=2)
    assert max(samples * width for samples, width in plain.shapes) > 300
    assert 32 < max(samples * width for samples, width in shapes.shapes) <= 64
    assert shapes.steps == plain.steps
    assert shapes.losses == pytest.approx(plain.losses, rel=1e-5)
    assert len(shapes.widths) > len(shapes.steps), "steps are of several micro-steps"
    assert summary["sample-audit"]["missing"] == summary["sample-audit"]["repeated"] == 0
    assert shapes.computed < plain.computed, "there is less padding in smaller parts"


def test_a_run_with_max_tokens_goes_on_inside_an_epoch():
    options = {"batch_size": 24, "epochs": 2}
    whole, _ = train(LengthBucketing(max_tokens=64), **options, output="whole")
    first, _ = train(LengthBucketing(max_tokens=64), **options, max_steps=5, save_every=1000)
    second, _ = train(LengthBucketing(max_tokens=64), **options, resume=True)
    assert first.ids + second.ids == whole.ids
    assert first.losses + second.losses == whole.losses


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
def test_parts_of_a_step_are_within_the_limit_alike_side_by_side_and_enough_for_all_processes(processes):
    rows, plugin = Rows(), LengthBucketing(max_tokens=96)
    plugin.configure(Settings(pad_to_multiple_of=8))
    for first in range(0, 200, 25):
        parts = plugin.split_step(rows, list(range(first, first + 25)), processes)
        costs = [len(part) * -(-max(rows.lengths[index] for index in part) // 8) * 8 for part in parts]
        assert sorted(index for part in parts for index in part) == list(range(first, first + 25))
        assert max(costs) <= 96
        assert costs == sorted(costs, reverse=True)
        assert len(parts) % processes == 0
    assert len(plugin.split_step(rows, [5], processes)) == 1, "one sample cannot be shared out"


def test_evaluation_keeps_to_max_tokens_and_has_the_same_metrics():
    still = {"max_steps": 1, "optimizer": "SGD", "weight_decay": 0.0, "max_grad_norm": 1e-12, "batch_size": 24}
    (_, limited), (_, plain) = train(LengthBucketing(max_tokens=48), **still), train(output="plain", **still)
    assert limited["validation"]["loss"] == pytest.approx(plain["validation"]["loss"], rel=1e-5)
    trainer = Trainer(
        Model(),
        Rows(),
        Rows(50),
        plugins=[LengthBucketing(max_tokens=48)],
        loss=nn.functional.mse_loss,
        batch_size=24,
        pad_to_multiple_of=1,
    )
    run = build(trainer.resolved)
    run.train_loader.loader.collate_fn.collator = run.eval_loaders["validation"].loader.collate_fn.collator = collate
    assert (
        max(batch.inputs[0].shape[0] * batch.inputs[0].shape[1] for batch in run.eval_loaders["validation"].batches())
        <= 48
    )


@pytest.mark.parametrize(
    ("options", "train_options", "expected"),
    [
        (
            {"max_tokens": 29},
            {},
            "sequence-too-long 30 29",
        ),
        (
            {"max_tokens": 30},
            {"pad_to_multiple_of": 16},
            "sequence-too-long 30 32 16",
        ),
        (
            {"max_tokens": 64},
            {"micro_batch_size": 4},
            "exclusive-options max_tokens train.micro_batch_size",
        ),
    ],
)
def test_sample_above_max_tokens_is_rejected_with_repair(options, train_options, expected):
    with expect_problem(expected, PluginError):
        train(LengthBucketing(**options), **train_options)
    assert not Path("run").exists()


@pytest.mark.slow
def test_number_of_shapes_is_logged_and_bounded_by_multiple(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    counts = []
    for multiple in (1, 16):
        train(LengthBucketing(max_tokens=256), pad_to_multiple_of=multiple, batch_size=24, output=f"run{multiple}")
        found = re.search(r"(\d+) shapes in (\d+) micro-batches \([\d.]+ a step\), (\d+) widths", caplog.text)
        assert found is not None
        counts.append([int(number) for number in found.groups()])
        caplog.clear()
    assert counts[1][0] < counts[0][0]
    assert counts[1][2] == 2 < counts[0][2]


def test_texts_keep_to_max_tokens_when_padded_to_a_multiple():
    Path("a.csv").write_text("text,label\n" + "".join(f"{'good ' * (1 + i % 20)},{i % 2}\n" for i in range(64)))
    data = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}
    model = {"config": TINY, "tokenizer": {"kind": "word"}}
    padded = data | {"pad_to_multiple_of": 8}
    run = make_run("text-classification", model, padded, objects=[LengthBucketing(max_tokens=96)], batch_size=32)
    sizes = {tuple(batch.inputs["input_ids"].shape) for batch in run.train_loader.batches()}
    assert {width for _, width in sizes} == {8, 16, 24}
    assert 64 < max(samples * width for samples, width in sizes) <= 96
    with expect_problem("option-without-effect data.padding max_length", PluginError):
        make_run(
            "text-classification", model, data | {"padding": "max_length"}, objects=[LengthBucketing(max_tokens=96)]
        )


@pytest.mark.parametrize(
    ("device", "plugins", "key", "multiple"),
    [
        ("cuda", ["length-bucketing"], None, 64),
        ("cuda", ["length-bucketing", "compile"], None, 64),
        ("cuda", ["length-bucketing", "compile"], 128, 128),
        ("cuda", ["length-bucketing"], 32, 32),
        ("cuda", ["compile"], 1, 1),
        ("cpu", ["length-bucketing"], None, None),
    ],
)
def test_shapes_are_few_on_cuda_unless_the_recipe_sets_a_multiple(device, plugins, key, multiple, monkeypatch):
    monkeypatch.setattr(machine, "this_machine", lambda asked: machine.Machine(device, "a device", ("fp32", "bf16")))
    recipe = make_recipe({"plugins": plugins, "train": {"epochs": 1}})
    resolution = resolve(recipe, any_machine=True).plugins
    resolution.hooks.check_recipe(recipe=recipe, plugins=resolution)
    recipe.data["pad_to_multiple_of"] = key  # after resolving, because a task would read it and need data
    assert resolution.configure(recipe).pad_to_multiple_of == multiple


def test_it_is_neither_recommended_nor_allowed_where_samples_are_read_in_blocks():
    gpu = machine.Machine(device="cuda", name="a GPU", dtypes=("fp32",))
    tree = {"model": {"name": "a-model"}, "data": {"files": {"train": "a.csv"}, "label": "label"}}
    assert LengthBucketing.recommend(make_recipe(tree), gpu) is not None
    tree["data"]["shuffle_block"] = 64
    assert LengthBucketing.recommend(make_recipe(tree), gpu) is None
    recipe = make_recipe(tree | {"plugins": ["length-bucketing"]})
    with expect_problem("exclusive-options data.shuffle_block length-bucketing", PluginError):
        resolve(recipe).plugins.configure(recipe)
