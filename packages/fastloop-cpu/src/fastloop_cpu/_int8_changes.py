"""How much predictions change when linear layers compute in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastloop import Output
from torch import Tensor

PROBABILITIES = "probabilities"
PREDICTIONS = "predictions"
"""The kind of values where there are no probabilities: numbers, vectors."""


@dataclass
class Changes:
    """How much the predictions of some rows change.

    Attributes:
        rows: Number of rows.
        count: Number of values.
        largest: The largest change of a value.
        total: The sum of the changes.
        kind: ``PROBABILITIES`` or ``PREDICTIONS``.
    """

    rows: int = 0
    count: int = 0
    largest: float = 0.0
    total: float = 0.0
    kind: str = PROBABILITIES

    def add(self, more: Changes) -> None:
        """Add those of further rows."""
        self.rows += more.rows
        self.count += more.count
        self.total += more.total
        self.kind = more.kind
        if more.largest > self.largest or math.isnan(more.largest):  # NaN stays
            self.largest = more.largest

    def __str__(self) -> str:
        mean = self.total / max(self.count, 1)
        return (
            f"in the first {self.rows} rows, {self.kind} differ by at most {self.largest:.2g} from those without 8 "
            f"bits, and by {mean:.2g} on average"
        )


@dataclass
class Values:
    """The predictions of a batch.

    Attributes:
        rows: Number of rows.
        kind: ``PROBABILITIES`` or ``PREDICTIONS``.
        numbers: float32 (values,), on the CPU.
    """

    rows: int
    kind: str
    numbers: Tensor

    def changes_to(self, changed: Values) -> Changes:
        """The changes from these values to others of the same rows. A value that is NaN in both has none."""
        if not self.numbers.numel():
            return Changes(self.rows, kind=self.kind)
        change = (self.numbers - changed.numbers).abs()
        are_nan = self.numbers.isnan() & changed.numbers.isnan()
        change[are_nan] = 0
        return Changes(self.rows, change.numel(), float(change.max()), float(change.double().sum()), self.kind)


def values_of_output(output: Output) -> Values:
    """Those of an evaluation: probabilities, if the output has class scores (N, C) and class ids (N,)."""
    scores = output.predictions
    targets = output.targets
    if scores is None:
        return Values(1, "losses", output.loss.detach().float().reshape(1).cpu())
    numbers = scores.detach().float()
    is_class = targets is not None and not targets.is_floating_point() and targets.shape == scores.shape[:1]
    if is_class and scores.dim() == 2:
        return Values(len(scores), PROBABILITIES, numbers.softmax(dim=-1).flatten().cpu())
    return Values(len(scores), PREDICTIONS, numbers.flatten().cpu())


def values_of_columns(columns: Mapping[str, Sequence[Any]]) -> Values:
    """Those of ``predict``: the columns of probabilities, or else all that have numbers."""
    rows = len(next(iter(columns.values())))
    chosen = [values for name, values in columns.items() if name.startswith(("probability", PROBABILITIES))]
    kind = PROBABILITIES if chosen else PREDICTIONS
    numbers: list[float] = []
    for values in chosen or columns.values():
        numbers.extend(numbers_of(values))
    return Values(rows, kind, torch.tensor(numbers, dtype=torch.float32))


def numbers_of(values: Any) -> Iterable[float]:
    """The numbers in nested lists or in a tensor, without whole numbers such as class ids, and without texts."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield from values.detach().float().flatten().tolist()
    elif isinstance(values, list | tuple):
        for value in values:
            yield from numbers_of(value)
    elif isinstance(values, float):
        yield values
