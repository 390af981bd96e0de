"""The columns that a classifier predicts: the label, its probability, and the probability of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastloop import PluginError

if TYPE_CHECKING:
    from fastloop import Output
    from fastloop_plugins.tasks.shared.two_classes import Decision


def predicted_columns(
    output: Output, names: Sequence[str] | None = None, decision: Decision | None = None
) -> dict[str, list[Any]]:
    """``label``, ``probability`` and the probability of each class, if the output has class scores (N, C) and class ids
    (N,) as targets. Otherwise ``output``: the values as they are.

    Args:
        names: Names of the classes; None: their numbers.
        decision: The label that the scores give; None: the class with the largest score.

    Raises:
        PluginError: The output has no predictions.
    """
    scores = output.predictions
    targets = output.targets
    if scores is None:
        raise PluginError(
            "the model's output has no predictions: only its loss is known.",
            code="no-predictions",
            remedy="Return logits beside it.",
        )
    classifies = (
        targets is not None
        and not targets.is_floating_point()
        and scores.dim() == 2
        and targets.shape == scores.shape[:1]
    )
    if not classifies or scores.shape[1] < 2:
        return {"output": scores.float().tolist() if scores.is_floating_point() else scores.tolist()}
    rows = scores.float().softmax(1).tolist()
    best = scores.argmax(1).tolist() if decision is None else decision.classes(scores).tolist()
    labels: Sequence[Any] = names if names is not None else range(scores.shape[1])
    columns: dict[str, list[Any]] = {
        "label": [labels[index] for index in best],
        "probability": [row[index] for row, index in zip(rows, best, strict=True)],
    }
    for index, label in enumerate(labels):
        columns[f"probability_{label}"] = [row[index] for row in rows]
    return columns
