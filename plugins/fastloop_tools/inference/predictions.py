"""The predictions for the samples of a loader, in the order of its dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastloop import PluginError, Run, loop
from fastloop.evaluation_results import evaluating, keeping_casts
from fastloop.problem import counted

if TYPE_CHECKING:
    from fastloop.data import Loader


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
                remedy = (
                    "Its hook predict returns a mapping: the name of a column -> a value for each sample of the batch."
                )
                if batch.samples != batch.drawn:
                    remedy = (
                        f"The collator made {batch.samples} of {batch.drawn} samples, and which ones is not known. "
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
