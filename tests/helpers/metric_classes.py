"""Every class of torchmetrics that can be constructed with simple arguments, and inputs that it measures."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import Metric

PARTS = ("classification", "regression", "text", "retrieval", "clustering", "nominal", "segmentation", "wrappers")
ARGUMENTS = {
    "num_classes": 3,
    "num_labels": 3,
    "num_groups": 2,
    "task": "binary",
    "beta": 1.0,
    "p": 2.0,
    "min_precision": 0.5,
    "min_recall": 0.5,
    "min_sensitivity": 0.5,
    "min_specificity": 0.5,
    "things": {0},
    "stuffs": {1},
    "data_range": 1.0,
    "threshold": 0.5,
}
"""Parameters without a default -> an argument."""


def classes() -> list[type[Metric]]:
    """All classes of metrics that torchmetrics exports."""
    homes = [
        importlib.import_module("torchmetrics"),
        *(importlib.import_module(f"torchmetrics.{name}") for name in PARTS),
    ]
    listed = [getattr(home, name) for home in homes for name in home.__all__]
    metrics = [cls for cls in listed if isinstance(cls, type) and issubclass(cls, Metric)]
    return list(dict.fromkeys(metrics))


def construct(cls: type[Metric]) -> Metric | None:
    """A metric of a class; None: it needs another package, a model or another metric."""
    parameters = inspect.signature(cls).parameters.values()
    required = [
        each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if not ARGUMENTS.keys() >= set(required):
        return None
    try:
        made: Any = cls(**{name: ARGUMENTS[name] for name in required})
    except (ImportError, RuntimeError, TypeError, ValueError, OSError):
        return None
    return made if isinstance(made, Metric) else None


@dataclass(frozen=True)
class Inputs:
    """Rows that a metric may measure: tensors, or lists of texts."""

    predictions: Any
    targets: Any

    def of(self, rows: Sequence[int]) -> tuple[Any, Any]:
        """Predictions and targets of the rows from the first to the last one."""
        chosen = slice(rows[0], rows[-1] + 1)
        return self.predictions[chosen], self.targets[chosen]


def candidate_inputs(rows: int) -> dict[str, Inputs]:
    """Inputs for all kinds of metrics."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(rows, generator=generator)
    table = torch.rand(rows, 3, generator=generator)
    bits = torch.arange(rows) % 2
    classes = torch.arange(rows) % 3
    pictures = torch.rand(rows, 3, 16, 16, generator=generator)
    texts = [f"the word {number % 4} of a line" for number in range(rows)]
    return {
        "binary": Inputs(numbers, bits),
        "classes": Inputs(table.softmax(1), classes),
        "labels": Inputs(table, (table + torch.rand(rows, 3, generator=generator) > 1).long()),
        "numbers": Inputs(numbers, numbers + 0.3 * torch.rand(rows, generator=generator)),
        "columns": Inputs(table, table + 0.3 * torch.rand(rows, 3, generator=generator)),
        "distributions": Inputs(table.softmax(1), table.flip(0).softmax(1)),
        "ids": Inputs((classes + bits) % 3, classes),
        "masks": Inputs((pictures > 0.5).long(), (pictures > 0.4).long()),
        "pictures": Inputs(pictures, pictures.flip(0)),
        "texts": Inputs(texts, [f"{text} {number % 3}" for number, text in enumerate(texts)]),
        "several texts": Inputs(texts, [[text, "the word"] for text in texts]),
    }
