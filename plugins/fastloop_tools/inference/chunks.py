"""The chunks of a prediction: the samples to predict in parts, so that a large file needs little memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, tee
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from fastloop import Plugin, RecipeError, Run, UsageError, hookimpl

if TYPE_CHECKING:
    from fastloop_tools.inference.keep import KeepOption


class Chunks(Plugin):
    """Builds the first chunk of the samples to predict as the split of the run, instead of the task's datasets.

    Args:
        name: The input as it stands on the command line, for messages; None: a split.
        kept: Columns of the input to keep; None: no column.

    Attributes:
        chunks: Datasets of the samples to predict, in order, beginning with the split of the run.
        lines: The lines of stdin from the first one on, for a run that is built again without a selected plugin. The
            command sets it to None once the run is built.
    """

    name = "prediction-chunks"

    def __init__(self, name: str | None, kept: KeepOption | None = None) -> None:
        super().__init__()
        self.kept = kept
        self.input = "stdin" if name == "-" else name
        self.chunks: Iterator[Any] = iter(())
        self.lines: Iterator[str] | None = None

    @hookimpl(tryfirst=True)
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        run.plugins.unsubscribe(self, "build_datasets")  # split_chunks calls the task's
        wanted: Any = run.recipe.inference
        source = wanted.source
        if isinstance(source, Iterator):
            source, self.lines = tee(self.lines or source)
        kept = None if self.kept is None or not self.kept.listed else self.kept
        if kept is not None and wanted.source is not None:
            kept.open(run, source, wanted.start)
        parts = run.hooks.build_prediction_data(run=run, source=source, start=wanted.start, size=wanted.chunk)
        if parts is None:
            parts = split_chunks(run, source, wanted.start, wanted.chunk)
        if kept is not None and wanted.source is not None:
            kept.check_predicted(run)
        chunks = iter(parts)
        first: Any = next(chunks, [])
        if self.input is not None and len(first) == 0:
            raise UsageError(
                code="nothing-to-predict",
                place=str(self.input),
                found="nothing to predict",
                expected="at least one sample",
            )
        if kept is not None and wanted.source is None:
            kept.open_split(run, wanted.split, first, wanted.start)
            kept.check_predicted(run)
        self.chunks = chain([first], chunks)
        return {wanted.split: first}


def split_chunks(run: Run, source: Any, start: int, size: int) -> Iterator[Any]:
    """Parts of a map-style split.

    Raises:
        RecipeError: The task reads no files, the recipe's data has no such split, or the split is iterable.
    """
    task = run.plugins.in_slot("task")
    split = run.loaders.first_split
    if source is not None:
        raise RecipeError(
            f"the task {task!r} reads no files or texts to predict. Predict a split: --split test.",
            code="unsupported-task",
            place=run.recipe.where,
        )
    datasets = run.hooks.build_datasets(run=run) or {}
    dataset: Any = datasets.get(split)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        if split in datasets:
            reason = f"it is {type(dataset).__name__}, which is iterable"
        else:
            reason = f"there are: {', '.join(datasets) or 'none'}"
        raise RecipeError(
            f"cannot predict the split {split!r}: {reason}.",
            code="iterable-dataset",
            place=f"{run.recipe.where}: data",
            expected="a map-style split",
        )
    firsts = range(start, len(dataset), size)
    return (Subset(dataset, range(first, min(first + size, len(dataset)))) for first in firsts)
