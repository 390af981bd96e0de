"""The samples of an evaluated split that a classifier got most wrong: their targets have the lowest probability.

A sample has one class, or any number of them."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastloop import Run, UsageError, loop
from fastloop.evaluation_results import evaluating
from fastloop_plugins.tasks.shared.problems import MultiLabel
from fastloop_plugins.text.row_places import RowPlace, find_places
from fastloop_plugins.text.task import TextTask
from fastloop_tools.inference.class_scores import class_names, classifies
from fastloop_tools.inference.keep import KeepOption
from fastloop_tools.shared.sample_text import describe_sample


class ScoredSample(NamedTuple):
    """A sample's log probability of its target, and its prediction. Sorts by the first.

    ``target`` and ``prediction`` are the ids of classes: one, or any number if a sample may have several.
    """

    target_score: float
    sample: int
    target: tuple[int, ...]
    prediction: tuple[int, ...]
    prediction_score: float
    classes: int


@dataclass(frozen=True)
class Origin:
    """Where a sample comes from.

    Attributes:
        place: Its file and line, such as ``reviews.csv, line 12``; None: unknown.
        kept: Columns of its row in the file.
        text: The text of its row, as the file has it; None: the sample is no row of a file.
    """

    place: str | None
    kept: dict[str, Any]
    text: str | None = None


@torch.no_grad()
def worst_samples(run: Run, split: str, count: int, keep: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The ``count`` samples whose targets have the lowest probability, lowest first. Computes the split once more.

    Each has ``index``, ``place``, ``input``, ``target``, ``prediction``, ``target_probability``,
    ``prediction_probability`` and ``kept``. The input is the text of its row, or a description of the sample. The
    place is a file and a line, the file of an image, or None. Probabilities are the softmax of the scores in float32.
    If a sample may have several classes, its target names all of them, and the probability is that of all classes being
    right: the product over the classes. Empty for a task that does not classify. Every process must call it.

    Args:
        keep: The option ``--keep``: columns of the file of each sample, for ``kept``.

    Raises:
        UsageError: The samples are no rows of files that have these columns.
    """
    own: list[ScoredSample] = []
    problem = several_labels(run)
    with evaluating(run.model):
        for batch in loop.evaluation_batches(run, run.eval_loaders[split]):
            output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
            if not batch.samples:
                continue  # this process only joins the others in the forward pass
            predictions = output.predictions
            targets = output.targets
            if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor):
                continue
            if len(predictions) != len(batch.ids):
                continue
            if classifies(predictions, targets):
                own = heapq.nsmallest(count, [*own, *score(predictions, targets, batch.ids)])
            elif problem is not None and predictions.shape == targets.shape:
                scored = score_sets(predictions, targets, batch.ids, problem.threshold)
                own = heapq.nsmallest(count, [*own, *scored])
    of_processes = run.processes.all_gather_object(own)
    worst = heapq.nsmallest(count, chain.from_iterable(of_processes))
    if not worst or not run.is_main:
        return []
    assert run.recipe.inference is not None
    assert run.recipe.inference.model is not None
    names = class_names(run, worst[0].classes)
    tokenizer = load_tokenizer(run.recipe.inference.model)
    dataset = run.datasets[split]
    origins = find_origins(run, split, [scored.sample for scored in worst], keep)
    samples = []
    for scored, origin in zip(worst, origins, strict=True):
        shown = origin.text
        if shown is None and hasattr(dataset, "__getitem__"):
            shown = describe_sample(dataset[scored.sample], tokenizer)
        samples.append(
            {
                "index": scored.sample,
                "place": origin.place,
                "kept": origin.kept,
                "input": shown,
                "target": name_classes(names, scored.target),
                "prediction": name_classes(names, scored.prediction),
                "target_probability": torch.tensor(scored.target_score).exp().item(),
                "prediction_probability": torch.tensor(scored.prediction_score).exp().item(),
            }
        )
    return samples


def find_origins(run: Run, split: str, samples: Sequence[int], keep: Sequence[str]) -> list[Origin]:
    """The origin of each sample: a row of a file, or an image.

    Args:
        keep: Columns of the files, as in ``KeepOption``.

    Raises:
        UsageError: There are columns to keep, and the samples are no rows of files.
    """
    task = run.plugins.task
    dataset = run.datasets[split]
    if isinstance(task, TextTask) and task.samples_are_rows:
        places = find_places(task.data, split, samples)
        if places is not None:
            columns = kept_columns(run, places, keep)
            names = task.data.columns
            of_rows = []
            for place, kept in zip(places, columns, strict=True):
                of_rows.append(Origin(str(place), kept, row_text(place, names)))
            return of_rows
    if keep:
        raise UsageError(
            f"the samples of the split {split!r} are no rows of files.",
            code="unsupported-task",
            place="--keep",
            remedy="Leave out --keep.",
        )
    name_of = getattr(dataset, "place_of", None)  # of images
    origins = []
    for sample in samples:
        name = None
        if name_of is not None:
            name = name_of(sample)
        origins.append(Origin(name, {}))
    return origins


def row_text(place: RowPlace, names: Sequence[str]) -> str | None:
    """The texts of a row, as its file has them: tokens would lose capitals, spaces and all that is cut.

    Args:
        names: Columns of texts. Several ones have a line each, which begins with the name.

    Returns:
        None: the row has no text in these columns.
    """
    texts = {}
    for name in names:
        column = place.table.columns.get(name)
        if column is not None and isinstance(column[place.row], str):
            texts[name] = column[place.row]
    if len(names) == 1:
        return texts.get(names[0])
    return "\n".join(f"{name}: {text}" for name, text in texts.items()) or None


def kept_columns(run: Run, places: Sequence[RowPlace], keep: Sequence[str]) -> list[dict[str, Any]]:
    """The columns to keep of each row. Reads each file once."""
    if not keep:
        return [{} for _ in places]
    by_file: dict[str, set[int]] = {}
    for place in places:
        by_file.setdefault(place.table.where, set()).add(place.number)
    rows = {file: KeepOption(keep).at(run, Path(file), numbers) for file, numbers in by_file.items()}
    kept = []
    for place in places:
        values = rows[place.table.where][place.number]
        kept.append({name: _json_value(value) for name, value in values.items()})
    return kept


def _json_value(value: Any) -> Any:
    """A cell as JSON: a date or another type of Parquet as text."""
    return json.loads(json.dumps(value, default=str))


def score(predictions: Tensor, targets: Tensor, ids: Sequence[int]) -> list[ScoredSample]:
    """The samples of a batch that have a target.

    Args:
        predictions: (N, classes) scores.
        targets: (N,) class ids; negative: no target.
    """
    scores = predictions.float().log_softmax(1)
    target_scores = scores.gather(1, targets.clamp(min=0)[:, None]).squeeze(1).tolist()
    best = scores.max(1)
    classes = scores.shape[1]
    rows = zip(target_scores, ids, targets.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    scored = []
    for target_score, sample, target, prediction, prediction_score in rows:
        if target >= 0:
            scored.append(ScoredSample(target_score, sample, (target,), (prediction,), prediction_score, classes))
    return scored


def several_labels(run: Run) -> MultiLabel | None:
    """The problem of a classifier of texts whose samples may have several classes; None: another task."""
    problem = getattr(run.plugins.task, "problem", None)
    return problem if isinstance(problem, MultiLabel) else None


def score_sets(predictions: Tensor, targets: Tensor, ids: Sequence[int], threshold: float) -> list[ScoredSample]:
    """The samples of a batch whose samples may have several classes.

    Args:
        predictions: (N, classes) scores.
        targets: (N, classes) of 0 and 1.
        threshold: A sample has a class if its probability is above this.
    """
    scores = predictions.float()
    log_present = logsigmoid(scores)
    log_absent = logsigmoid(-scores)
    is_target = targets > 0.5
    is_predicted = scores.sigmoid() > threshold
    # A sample with the scores [2, -1] and the classes [1, 0] has the log probability log s(2) + log s(1).
    target_scores = torch.where(is_target, log_present, log_absent).sum(1).tolist()
    prediction_scores = torch.where(is_predicted, log_present, log_absent).sum(1).tolist()
    scored = []
    for row, sample in enumerate(ids):
        target = tuple(is_target[row].nonzero()[:, 0].tolist())
        prediction = tuple(is_predicted[row].nonzero()[:, 0].tolist())
        scored.append(
            ScoredSample(target_scores[row], sample, target, prediction, prediction_scores[row], scores.shape[1])
        )
    return scored


def name_classes(names: Sequence[str], classes: Sequence[int]) -> str:
    """The names of a sample's classes: ``spam``, ``spam, toxic`` or ``none``."""
    return ", ".join(names[index] for index in classes) or "none"


def load_tokenizer(model: Path) -> Any:
    """The tokenizer that was exported with the model; None: there is none."""
    if not (model / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)
