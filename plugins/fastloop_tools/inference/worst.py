"""The samples of an evaluated split that a classifier got most wrong: their targets have the lowest probability."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastloop import Run, loop
from fastloop.evaluation_results import evaluating
from fastloop_tools.inference.classes import class_names, classifies
from fastloop_tools.shared.sample_text import describe_sample


class ScoredSample(NamedTuple):
    """A sample's log probability of its target, and its most probable class. Sorts by the first."""

    target_score: float
    sample: int
    target: int
    prediction: int
    prediction_score: float
    classes: int


@torch.no_grad()
def worst_samples(run: Run, split: str, count: int) -> list[dict[str, Any]]:
    """The ``count`` samples whose targets have the lowest probability, lowest first. Computes the split once more.

    Each has ``index``, ``input``, ``target``, ``prediction``, ``target_probability`` and ``prediction_probability``.
    Probabilities are the softmax of the scores in float32. Empty for a task that does not classify. Every process must
    call it.
    """
    own: list[ScoredSample] = []
    with evaluating(run.model):
        for batch in loop.evaluation_batches(run, run.eval_loaders[split]):
            output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
            if not batch.samples:
                continue  # this process only joins the others in the forward pass
            predictions, targets = output.predictions, output.targets
            if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor):
                continue
            if classifies(predictions, targets) and len(predictions) == len(batch.ids):
                own = heapq.nsmallest(count, [*own, *score(predictions, targets, batch.ids)])
    of_processes = run.processes.all_gather_object(own)
    worst = heapq.nsmallest(count, chain.from_iterable(of_processes))
    if not worst or not run.is_main:
        return []
    assert run.recipe.inference is not None
    assert run.recipe.inference.model is not None
    names = class_names(run, worst[0].classes)
    tokenizer = load_tokenizer(run.recipe.inference.model)
    dataset = run.datasets[split]
    samples = []
    for one in worst:
        shown = describe_sample(dataset[one.sample], tokenizer) if hasattr(dataset, "__getitem__") else None
        samples.append(
            {
                "index": one.sample,
                "input": shown,
                "target": names[one.target],
                "prediction": names[one.prediction],
                "target_probability": torch.tensor(one.target_score).exp().item(),
                "prediction_probability": torch.tensor(one.prediction_score).exp().item(),
            }
        )
    return samples


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
            scored.append(ScoredSample(target_score, sample, target, prediction, prediction_score, classes))
    return scored


def load_tokenizer(model: Path) -> Any:
    """The tokenizer that was exported with the model; None: there is none."""
    if not (model / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)
