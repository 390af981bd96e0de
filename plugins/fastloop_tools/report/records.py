"""Reads JSON files of runs, sweeps and evaluations. An error names the file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError

MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading a value from a record of another form. Pydantic's is a ``ValueError``."""


@dataclass
class Class:
    """The metrics of one class in an evaluation."""

    name: str
    precision: float
    recall: float
    f1: float
    samples: int


@dataclass
class WorstSample:
    """A sample that the model got wrong. ``input`` is None if it has no text."""

    index: int
    target: str
    prediction: str
    target_probability: float
    prediction_probability: float
    input: str | None


@dataclass
class Evaluation:
    """A result of ``fastloop evaluate``.

    Attributes:
        steps: Optimizer steps of the evaluated run; None: unknown.
        confusion: Counts, target by prediction; empty without classes.
        arguments: The recipe and overrides of the command.
    """

    metrics: dict[str, float]
    classes: list[Class]
    confusion: list[list[int]]
    split: str | None = None
    file: str | None = None
    steps: int | None = None
    arguments: list[str] | None = None
    worst: list[WorstSample] | None = field(default_factory=list)

    @property
    def samples(self) -> int:
        """The number of samples of all classes."""
        return sum(row.samples for row in self.classes)


def read_evaluation(path: Path) -> Evaluation:
    """Read a result of ``fastloop evaluate``.

    Raises:
        UsageError: The file cannot be read, or has another form.
    """
    from pydantic import TypeAdapter

    try:
        found = TypeAdapter(Evaluation).validate_python(read_json(path))
        if {len(found.confusion), *map(len, found.confusion)} - {len(found.classes)}:
            raise ValueError("the classes and their confusions differ in number")
    except MALFORMED:
        raise UsageError(
            f"{path}: expected the results that `fastloop evaluate` writes. Evaluate the run again, or remove the file."
        ) from None
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UsageError: The file cannot be read, or holds another value.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected one JSON object.")
    return found
