"""The chunks of a prediction: a split in parts, and the predictions for one part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, tee
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from fastloop import Plugin, PluginError, RecipeError, Run, UsageError, hookimpl, loop
from fastloop.evaluation_results import evaluating, keeping_casts
from fastloop.problem import counted

if TYPE_CHECKING:
    from fastloop.data import Loader
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


def _find_problem(predictions: Mapping[str, Any] | None, samples: int) -> str:
    """How the result of ``predict`` differs from one value for each sample in each column; empty if it does not."""
    if predictions is None:
        return "it does not implement the hook predict"
    if not predictions:
        return "predict returned no column"
    for name, values in predictions.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            return f"predict returned {name!r}: a {type(values).__name__}, expected a value for each sample"
        if len(values) != samples:
            return f"predict returned {counted(len(values), 'value')} of {name!r} for {counted(samples, 'sample')}"
    return ""


@torch.no_grad()
def predict_dataset(run: Run, loader: Loader) -> dict[str, list[Any]]:
    """Predictions for the samples of a loader, in the order of its dataset: column -> a value for each sample.

    Every process must call it, and gets all predictions. A sample that could not be read has None.

    Raises:
        PluginError: The task predicts nothing, or not one value for each sample.
    """
    columns: dict[str, dict[int, Any]] = {}
    with evaluating(run.model), keeping_casts(run.world_size):
        for batch in loop.evaluation_batches(run, loader):
            predictions = run.hooks.predict(run=run, batch=batch.inputs)
            if not batch.samples:
                continue  # this process only joins the others in the forward pass
            problem = _find_problem(predictions, len(batch.ids))
            if problem or predictions is None:
                task = run.plugins.in_slot("task")
                remedy = ""
                if batch.samples != batch.drawn:
                    remedy = (
                        f" The collator made {batch.samples} of {batch.drawn} samples, and which ones is not known. "
                        "Predict a dataset of which it keeps every sample, such as a torch.utils.data.Subset."
                    )
                raise PluginError(
                    f"the task {task!r} cannot predict: {problem}.",
                    code="unsupported-task" if predictions is None else "wrong-result",
                    place=run.recipe.where,
                    remedy=remedy,
                )
            for name, values in predictions.items():
                if isinstance(values, torch.Tensor):
                    values = values.cpu()
                columns.setdefault(name, {}).update(zip(batch.ids, values, strict=True))
    for part in run.processes.all_gather_object(columns):
        for name, column in part.items():
            columns.setdefault(name, {}).update(column)
    if hasattr(loader.dataset, "__len__"):
        size = len(loader.dataset)
    else:  # the samples are numbered from 0
        size = 1 + max((max(column) for column in columns.values()), default=-1)
    return {name: [column.get(index) for index in range(size)] for name, column in columns.items()}
