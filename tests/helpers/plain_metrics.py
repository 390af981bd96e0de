"""The metrics of each task by scikit-learn, SciPy and plain formulas, from the outputs of a model for all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import entity_reference
import numpy as np
import torch
from plain_data import CLASSES, TAGS, class_of_image, ids_of, rows
from plain_losses import blocks, scores_of_image, scores_of_tags, scores_of_target, scores_of_text
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics

Metrics = Callable[[Any, float], dict[str, float]]
"""``(model, loss of all samples) -> metrics beside the loss``."""

MORE_OF_CLASSES = {
    "auroc": {"type": "AUROC"},
    "average_precision": {"type": "MulticlassAveragePrecision", "average": "macro"},
    "kappa": {"type": "CohenKappa"},
    "matthews": {"type": "MatthewsCorrCoef"},
    "recall": {"type": "MulticlassRecall", "average": "macro"},
}
"""Metrics that recipes add to those of a task."""
MORE_OF_NAMES = {
    "auroc": {"type": "MultilabelAUROC"},
    "average_precision": {"type": "MultilabelAveragePrecision"},
    "hamming": {"type": "MultilabelHammingDistance"},
}
MORE_OF_NUMBERS = {"r2": {"type": "R2Score"}}
MORE_OF_TAGS = {"f1_tags": {"type": "MulticlassF1Score"}}


def measure_classes(scores: Sequence[Any], targets: Sequence[int]) -> dict[str, float]:
    """The metrics of a classifier of three classes."""
    probabilities = torch.stack([*scores]).softmax(1).numpy()
    predicted = probabilities.argmax(1)
    one_hot = np.eye(len(CLASSES))[[*targets]]
    return {
        "accuracy": metrics.accuracy_score(targets, predicted),
        "f1": metrics.f1_score(targets, predicted, average="macro"),
        "auroc": metrics.roc_auc_score(one_hot, probabilities, average="macro"),
        "average_precision": metrics.average_precision_score(one_hot, probabilities, average="macro"),
        "kappa": metrics.cohen_kappa_score(targets, predicted),
        "matthews": metrics.matthews_corrcoef(targets, predicted),
        "recall": metrics.recall_score(targets, predicted, average="macro"),
    }


def of_class(model: Any, loss: float) -> dict[str, float]:
    scores = [scores_of_text(model, index) for index in range(len(rows()))]
    return measure_classes(scores, [CLASSES.index(row["class"]) for row in rows()])


def of_image(model: Any, loss: float) -> dict[str, float]:
    indices = range(len(rows()))
    scores = [scores_of_image(model, index) for index in indices]
    return measure_classes(scores, [class_of_image(index) for index in indices])


def of_names(model: Any, loss: float) -> dict[str, float]:
    probabilities = torch.stack([scores_of_text(model, index) for index in range(len(rows()))]).sigmoid().numpy()
    predicted = probabilities > 0.5
    targets = np.array([[name in row["names"] for name in CLASSES] for row in rows()])
    return {
        "f1_micro": metrics.f1_score(targets, predicted, average="micro"),
        "f1_macro": metrics.f1_score(targets, predicted, average="macro"),
        "subset_accuracy": metrics.accuracy_score(targets, predicted),
        "auroc": metrics.roc_auc_score(targets, probabilities, average="macro"),
        "average_precision": metrics.average_precision_score(targets, probabilities, average="macro"),
        "hamming": metrics.hamming_loss(targets, predicted),
    }


def of_number(model: Any, loss: float) -> dict[str, float]:
    found = [scores_of_text(model, index)[0].item() for index in range(len(rows()))]
    targets = [row["number"] for row in rows()]
    return {
        "mse": metrics.mean_squared_error(targets, found),
        "mae": metrics.mean_absolute_error(targets, found),
        "pearson": pearsonr(targets, found).statistic,
        "spearman": spearmanr(targets, found).statistic,
        "r2": metrics.r2_score(targets, found),
    }


def of_tags(model: Any, loss: float) -> dict[str, float]:
    """A word has the tag of its first token."""
    actual = [row["tags"] for row in rows()]
    predicted = []
    for index, row in enumerate(rows()):
        scores = scores_of_tags(model, index)
        place = 1
        tags = []
        for word in row["words"]:
            tags.append(TAGS[int(scores[place].argmax())])
            place += len(ids_of(word))
        predicted.append(tags)
    flat = [[tag for tags in sentences for tag in tags] for sentences in (actual, predicted)]
    return {
        "accuracy": metrics.accuracy_score(*flat),
        "f1_tags": metrics.f1_score(*flat, average="macro"),
        **entity_reference.total(entity_reference.count(actual, predicted)),
    }


def of_texts(model: Any, loss: float) -> dict[str, float]:
    return {"perplexity": math.exp(loss)}


def of_blocks(model: Any, loss: float) -> dict[str, float]:
    tokens = sum(map(len, blocks()))
    characters = sum(len(row["text"]) for row in rows())
    return {"perplexity": math.exp(loss), "bits_per_character": loss / math.log(2) * tokens / characters}


def of_target(begin: str, start: str) -> Metrics:
    """The arguments are those of the loss."""

    def measure(model: Any, loss: float) -> dict[str, float]:
        right: list[bool] = []
        for index in range(len(rows())):
            scores, target = scores_of_target(model, index, begin, start)
            right += _are_right(scores, target)
        return {"perplexity": math.exp(loss), "token_accuracy": sum(right) / len(right)}

    return measure


def _are_right(scores: Any, target: Iterable[int]) -> list[bool]:
    return [int(row.argmax()) == token for row, token in zip(scores, target, strict=True)]


def of_nothing(model: Any, loss: float) -> dict[str, float]:
    """The loss is the only result."""
    return {}
