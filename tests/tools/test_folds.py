"""The plugin ``folds``: parts that are disjoint, complete and equal, for every kind of map-style data.

Modules:
    plugins/fastloop_tools/sweep/folds.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_helpers import VIT
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fastloop import CheckpointError, Plugin, PluginError, RecipeError, Run, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem, tiny_data
from fastloop.testing.tasks import TEXTS, write_texts
from fastloop_tools.sweep.folds import SampleSubset, changes_when_read, classes_of, divide


@pytest.mark.parametrize(("size", "of"), [(5, 5), (67, 5), (100, 3), (9, 2)])
@pytest.mark.parametrize("stratified", [True, False])
def test_folds_are_disjoint_complete_and_equal_in_size_and_classes(size, of, stratified):
    classes = np.random.default_rng(1).choice(3, size, p=[0.7, 0.25, 0.05]) if stratified else None
    folds = divide(size, of, 7, classes)
    counts = np.bincount(folds, minlength=of)
    assert (len(folds), counts.sum(), len(counts)) == (size, size, of), "each sample is in one fold"
    assert counts.max() - counts.min() <= 1
    for cls in range(3) if classes is not None else ():
        shares = np.bincount(folds[classes == cls], minlength=of)
        assert shares.max() - shares.min() <= 1
    assert np.array_equal(folds, divide(size, of, 7, classes))
    assert size == of == 5 or not np.array_equal(folds, divide(size, of, 8, classes))


class Parts(Plugin):
    """Records the datasets of a run."""

    name = "parts"

    @hookimpl
    def check_run(self, run: Run) -> None:
        self.datasets = run.datasets


def inputs(dataset: Any) -> list[tuple[float, ...]]:
    return [tuple(dataset[index][0].tolist()) for index in range(len(dataset))]


def test_every_sample_of_both_splits_is_validated_once_and_never_trained_beside(tiny_run):
    whole = sorted(inputs(tiny_data()) + inputs(tiny_data(32, seed=1)))
    validated: list[tuple[float, ...]] = []
    metrics = []
    for number in range(4):
        parts = Parts()
        result = tiny_run([{"folds": {"number": number, "of": 4}}, parts], epochs=1)
        train, validation = inputs(parts.datasets["train"]), inputs(parts.datasets["validation"])
        assert sorted(train + validation) == whole
        assert abs(len(validation) - len(whole) / 4) < 1
        validated += validation
        metrics.append(result.summary["validation"]["loss"])
    assert sorted(validated) == whole
    assert len(set(metrics)) == 4


def test_the_order_of_samples_follows_from_the_seed_and_a_run_resumes_only_with_its_fold(tiny_run, tmp_path):
    fold = [{"folds": {"number": 1, "of": 3}}]
    whole = tiny_run(fold)
    assert tiny_run(fold).losses == whole.losses
    assert tiny_run(fold, seed=5).losses != whole.losses
    tiny_run(fold, max_steps=5, output="run")
    resumed = tiny_run(fold, output="run", resume=True)
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    for other in ({"number": 0, "of": 3}, {"number": 1, "of": 4}):
        with expect_problem("resume-differs plugins.folds.", CheckpointError):
            tiny_run([{"folds": other}], output="run", resume=True)


def test_texts_keep_their_lengths_and_classes_for_other_plugins():
    write_texts(Path())
    parts = Parts()
    tree = {key: value for key, value in TEXTS.items() if key in ("model", "data")}
    plugins = ["length-bucketing", {"folds": {"of": 3}}, {"log": False}, {"progress": False}]
    recipe = make_recipe(
        {**tree, "train": {"epochs": 1, "batch_size": 8, "device": "cpu"}, "plugins": plugins, "output": "run"}
    )
    from training_runs import execute

    from fastloop.lifecycle import build

    execute(build(resolve(recipe, objects=[parts])))
    train, validation = parts.datasets["train"], parts.datasets["validation"]
    assert (len(train), len(validation)) == (34, 17), "35 and 16 samples"
    assert [len(train[index]["input_ids"]) for index in range(34)] == train.lengths.tolist()
    assert sorted(np.bincount(validation.labels).tolist()) == [8, 9]


class Targets(Dataset[Any]):
    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index, self.targets[index]


def test_classes_are_found_without_reading_samples():
    assert classes_of([Targets([0, 1, 1, 0]), Targets(torch.tensor([2, 2, 2, 2]))]).tolist() == [0, 1, 1, 0, 2, 2, 2, 2]
    assert classes_of([tiny_data(4)]).tolist() == tiny_data(4).tensors[1].tolist()
    for without in (
        Targets([0.5, 1.0, 2.0, 0.1]),
        Targets([[0, 1]] * 4),
        Targets(None),
        TensorDataset(torch.zeros(4, 2)),
        [1, 2, 3, 4],
    ):
        assert classes_of([tiny_data(4), without]) is None


def test_a_part_hashes_its_samples():
    data = tiny_data(6)
    part = SampleSubset([data], np.array([1, 3]))
    assert len(part) == 2
    assert torch.equal(part[1][0], data[3][0])
    assert not hasattr(part, "lengths")
    assert (
        part.fingerprint()
        == SampleSubset([data], np.array([1, 3])).fingerprint()
        != SampleSubset([data], np.array([1, 4])).fingerprint()
    )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(tiny_data(8))


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"number": 5}, None, "out-of-range plugins.folds.number 5 0 4"),
        ({"of": 1}, None, "invalid-value plugins.folds.of"),
        ({"of": 200}, None, "out-of-range plugins.folds.of 200 99"),
        ({}, Stream(), "iterable-dataset plugins.folds"),
        ({}, DataLoader(tiny_data(), batch_size=8), "own-sampler plugins.folds"),
    ],
)
def test_wrong_options_and_data_are_refused(tiny_run, options, data, message):
    with expect_problem(message, (RecipeError, PluginError)):
        tiny_run([{"folds": options}], data=data, output="out")
    assert not Path("out").exists()


def test_a_fold_to_validate_on_has_no_random_changes_of_training():
    """Images of both splits: those that are trained on change in each epoch, and those of the fold never do."""
    from image_helpers import write_images
    from training_runs import execute

    from fastloop.lifecycle import build

    write_images(Path("images"), {"train": 4, "validation": 2, "test": 1})
    parts = Parts()
    tree = {
        "model": {"config": VIT},
        "data": {"images": "images", "image_size": 16, "augment": {"crop": True, "scale": [0.1, 0.3]}},
        "train": {"epochs": 1, "batch_size": 6, "device": "cpu"},
        "plugins": ["image-classification", {"folds": {"of": 3}}, {"log": False}, {"progress": False}],
        "output": "run",
    }
    run = build(resolve(make_recipe(tree), objects=[parts]))
    task = next(plugin for plugin in run.plugins if plugin.name == "image-classification")
    seen: dict[str, list[list[torch.Tensor]]] = {"train": [], "validation": []}
    for epoch in range(2):
        task.epoch.fill_(epoch)
        for split, epochs in seen.items():
            dataset = parts.datasets[split]
            epochs.append([dataset[index][0] for index in range(len(dataset))])
    assert [len(epochs[0]) for epochs in seen.values()] == [12, 6]
    assert all(torch.equal(*pair) for pair in zip(*seen["validation"], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(*seen["train"], strict=True))
    assert np.bincount([parts.datasets["validation"][index][1] for index in range(6)]).tolist() == [2, 2, 2]
    execute(run)


class Noisy(Dataset[Any]):
    """Samples with noise, which a method for each split may leave out."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.randn(8), torch.tensor(index % 3)


class Declared(Noisy):
    def as_split(self, split: str) -> Dataset[Any]:
        return self if split == "train" else TensorDataset(torch.zeros(12, 8), torch.arange(12) % 3)


@pytest.mark.parametrize(("data", "warnings"), [(Noisy(), 1), (Declared(), 0), (tiny_data(12), 0)])
def test_samples_that_change_when_they_are_read_are_a_warning(data, warnings, tiny_run, caplog):
    tiny_run([{"folds": {"of": 3}}], data=data, epochs=1)
    assert caplog.text.count("as_split") == warnings


class Longer(Noisy):
    """Each read gives a sample one element more, which are all 0."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return [torch.zeros(8)] * self.reads


def test_a_sample_that_is_read_with_more_elements_changes():
    assert changes_when_read(Longer())
    assert not changes_when_read(tiny_data(12))


@pytest.mark.parametrize("task", ["text-classification", "module"])
def test_balanced_class_weights_count_the_samples_of_the_folds_that_are_trained_on(task):
    """20 of 30 rows have the class 0. A fold that left all weights as those of the file would weight the held-out rows,
    too."""
    labels = [0, 0, 1] * 10
    if task == "module":
        Path("net.py").write_text(
            "import torch\nfrom torch.utils.data import TensorDataset\n\n\ndef data():\n"
            f"    rows = TensorDataset(torch.randn(30, 4), torch.tensor({labels}))\n"
            "    return {'train': rows}\n\n\nclass Net(torch.nn.Linear):\n"
            "    def __init__(self):\n        super().__init__(4, 2)\n"
        )
        sections: dict[str, Any] = {"model": {"module": "net.py:Net"}, "data": {"module": "net.py:data"}}
    else:
        rows = [f"word{number} other,{label}" for number, label in enumerate(labels)]
        Path("train.csv").write_text("\n".join(["text,label", *rows]))
        data = {"files": {"train": "train.csv"}, "text": "text", "label": "label", "max_length": 8}
        sections = {"model": TEXTS["model"], "data": {**data, "validation_fraction": 0}}
    loss = {"name": "cross_entropy", "class_weights": "balanced"}
    plugins = [{task: {"loss": loss}}, {"folds": {"number": 2, "of": 4}}]
    train = {"max_steps": 1, "batch_size": 4, "device": "cpu"}
    run = build(resolve(make_recipe({**sections, "plugins": plugins, "train": train, "output": "run"})))
    dataset = run.datasets["train"]
    if task == "module":
        trained = [int(dataset[index][1]) for index in range(len(dataset))]
    else:
        trained = dataset.labels.tolist()
    counts = np.bincount(trained)
    assert len(trained) < len(labels)
    assert counts[0] != 2 * counts[1], "the fold has other shares than the file"
    weights = run.plugins.task.criterion.weights
    assert weights.tolist() == pytest.approx((len(trained) / (2 * counts)).tolist())
