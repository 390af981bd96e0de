"""Tests of drawn-shapes: its behaviour, and fastloop's conformance tests."""

import numpy as np
import pytest
from fastloop import RecipeError
from fastloop.lifecycle import execute, open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import Conformance

from drawn_shapes import SHAPES, DrawnShapes, draw


@pytest.fixture
def fit(tmp_path):
    """Train the task: ``fit({"size": 12}, epochs=2)`` -> its run and the summary."""

    def call(options, **train):
        tree = {"train": train, "plugins": [{"drawn-shapes": options}], "output": str(tmp_path / "run")}
        with open_run(resolve(make_recipe(tree))) as run:
            return run, execute(run)

    return call


def test_three_shapes_are_learned(fit):
    run, summary = fit({"count": 800, "classes": 3}, epochs=5, lr=4e-3)
    assert summary["test"]["accuracy"] > 0.9
    assert run.model[-1].out_features == 3
    assert {split: len(dataset) for split, dataset in run.datasets.items()} == {
        "train": 800,
        "validation": 200,
        "test": 200,
    }


def test_a_seed_draws_the_same_images_and_another_one_others():
    labels = np.arange(50) % 5
    once, again, other = (draw(labels, 12, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert once.shape == (50, 1, 12, 12)
    assert once.dtype == np.float32
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


def test_the_splits_differ_and_the_test_split_does_not_follow_the_others_seed(fit):
    first, _ = fit({"count": 40}, epochs=1, seed=1)
    images = {split: dataset.tensors[0] for split, dataset in first.datasets.items()}
    assert not images["validation"].equal(images["test"])
    assert not images["train"][:10].equal(images["test"])
    second, _ = fit({"count": 40}, epochs=1, seed=2)
    assert images["test"].equal(second.datasets["test"].tensors[0])


def test_each_shape_covers_what_it_should():
    """Mean images of each class: the pixels that a shape covers, over all positions and sizes."""
    labels = np.repeat(np.arange(len(SHAPES)), 400)
    images = draw(labels, 32, np.random.default_rng(0))[:, 0]
    mean = {shape: images[labels == index].mean(0) for index, shape in enumerate(SHAPES)}
    share = {shape: image.sum() for shape, image in mean.items()}
    assert share["square"] == pytest.approx(share["disc"] * 0.9**2 * 4 / np.pi, rel=0.1)
    assert share["triangle"] == pytest.approx(share["square"] / 2, rel=0.1)
    assert share["ring"] == pytest.approx(share["disc"] * (1 - 0.6**2), rel=0.1)
    assert mean["ring"][16, 16] < 0.3 < mean["disc"][16, 16]
    assert mean["triangle"][:16].sum() < 0.7 * mean["triangle"][16:].sum()


def test_it_refuses_sections_that_it_does_not_read():
    tree = {"data": {"name": "imdb"}, "plugins": ["drawn-shapes"]}
    resolved = resolve(make_recipe(tree))
    with (
        pytest.raises(RecipeError, match="recipe: data: 'drawn-shapes' has its own. Remove the section"),
        open_run(resolved),
    ):
        pass


def test_it_refuses_more_classes_than_there_are_shapes():
    with pytest.raises(RecipeError, match="drawn-shapes.classes: found 6"):
        DrawnShapes(classes=6)


class TestConformance(Conformance):
    plugin = "drawn-shapes"
    options = {"count": 67, "size": 8}
    task = {}
