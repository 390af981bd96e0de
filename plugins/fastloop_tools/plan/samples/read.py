"""Reads training samples for `fastloop plan --samples`. Asks the task for them, and builds no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from fastloop import Plugin, RecipeError, UsageError, hookspec
from fastloop_tools.shared.data_plugins import open_data
from fastloop_tools.shared.sample_text import describe_sample

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe

    Sample = Sequence[tuple[str, str | Sequence[tuple[str, str | None]]]]


class SampleHooks:
    """The hook that a task may implement."""

    @hookspec(firstresult=True)
    def show_samples(self, run: Run, count: int) -> Iterable[Sample] | None:
        """The first ``count`` samples of the training split, encoded as in training. Called in place of
        ``build_datasets``.

        A sample is a list of pairs: the name of a part, and its text or its tokens. A token is a pair of its text and
        its target: None without a loss, empty if the target is the token, or a label.
        """


class TaskSamples(Plugin):
    """Declares the hook."""

    name = "task-samples"
    hookspecs = SampleHooks


def read_samples(recipe: Recipe, count: int) -> list[Sample]:
    """The first training samples of an expanded recipe. Reads the data as training does.

    Raises:
        RecipeError: The recipe or the data is wrong, or the data is streamed.
        UsageError: The training split has no sample.
    """
    with open_data(recipe, [TaskSamples()]) as run:
        described = run.hooks.show_samples(run=run, count=count)
        if described is None:
            described = describe_samples(run, count)
        samples = list(islice(described, count))
    if not samples:
        raise UsageError(
            "the training split has no sample that can be shown.",
            code="empty-split",
            place=f"{recipe.where}: --samples {count}",
        )
    return samples


def describe_samples(run: Run, count: int) -> Iterable[Sample]:
    """Samples of a task that does not implement the hook: texts and few numbers, and the shapes of larger tensors.

    Raises:
        RecipeError: The training split is iterable.
    """
    from fastloop.lifecycle import build_datasets

    build_datasets(run)
    dataset = run.datasets["train"]
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise RecipeError(
            f"--samples reads samples by index, and {type(dataset).__name__} is iterable.",
            code="iterable-dataset",
            place=f"{run.recipe.where}: data",
        )
    for index in range(min(count, len(dataset))):
        sample = dataset[index]
        pairs = [("sample", sample)]
        if isinstance(sample, Mapping):
            pairs = list(sample.items())
        elif isinstance(sample, tuple) and len(sample) == 2:
            pairs = [("input", sample[0]), ("target", sample[1])]
        yield [(str(name), describe_sample(value, None) or f"{value!r:.200}") for name, value in pairs]
