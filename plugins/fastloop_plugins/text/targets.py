"""Labels of the text tasks that are not one class a row: numbers, or any number of classes.

Chooses the reader by ``data.label_type``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins.rows.table import Table, show
from fastloop_plugins.text.labels import (
    NUMBER,
    Labels,
    count_classes,
    is_label,
    labels_of_model,
    list_labels,
    number_labels,
)

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData

ONLY = "LABEL_0"
"""Name of the single output of a regression, as transformers names it."""
SWITCHES = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0}
"""Cells of a column that states for each row whether it has a class, in lower case."""


def read_labels(parts: Mapping[str, list[Table]], data: TextData) -> Labels:
    """The labels of all splits. In inference, by the classes of the model: ``data.classes``.

    Raises:
        RecipeError: A label has another form than ``data.label_type``, or is no class.
    """
    if data.label_type == "number":
        return Labels(
            {role: [value for part in found for value in _numbers(part, data)] for role, found in parts.items()},
            [ONLY],
            [],
            [],
        )
    if data.label_type == "classes":
        return _class_sets(parts, data)
    if data.inference is None:
        return number_labels(parts, data.options, data.where)
    return labels_of_model(parts, data.options, data.classes, str(data.inference.model))


def is_readable(value: Any, data: TextData) -> bool:
    """Whether a cell can be a label of ``data.label_type``."""
    if data.label_type == "number":
        return read_number(value) is not None
    if data.label_type == "classes":
        return _switch(value) is not None if data.several else isinstance(value, list | tuple)
    return is_label(value)


def summarize(labels: Sequence[Any], data: TextData) -> str:
    """The labels of the training split for the log: rows of each class, or the range of the numbers."""
    if data.label_type == "number":
        return f"labels in train: {min(labels):g} to {max(labels):g}, mean {sum(labels) / len(labels):g}"
    ids = labels
    if data.label_type == "classes":
        ids = [index for row in labels for index, present in enumerate(row) if present]
    return f"rows of each class in train: {count_classes(ids, data.classes)}"


def read_number(value: Any) -> float | None:
    """A finite number, or a text that is one; None for anything else."""
    if isinstance(value, str):
        value = float(value) if NUMBER.fullmatch(value.strip()) else None
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _numbers(part: Table, data: TextData) -> list[float]:
    found = []
    for row, value in enumerate(part.column("label", data.labels[0]), 1):
        number = read_number(value)
        if number is None or (isinstance(value, str) and not part.untyped):
            raise RecipeError(
                f"{part.row(row)}: column {data.labels[0]!r} (data.label) holds {show(value)}, expected a finite "
                "number (data.label_type=number). For classes: data.label_type=class."
            )
        found.append(number)
    return found


def _switch(value: Any) -> float | None:
    if isinstance(value, Real):
        return float(value) if value in (0, 1) else None
    return SWITCHES.get(str(value).lower())


def _class_sets(parts: Mapping[str, list[Table]], data: TextData) -> Labels:
    """A row of 0.0 and 1.0 for each row of the data, in the order of the classes."""
    named = {role: [(part, _names(part, data)) for part in found] for role, found in parts.items()}
    classes = data.classes if data.inference is not None else data.labels
    if data.inference is None and not data.several:
        classes = sorted({name for _, rows in named["train"] for row in rows for name in row})
        if len(classes) < 2:
            where = ", ".join(part.where for part, _ in named["train"])
            raise RecipeError(
                f"{where}: column {data.labels[0]!r} (data.label) names {len(classes)} class, expected at least two."
            )
    known = set(classes)
    for found in named.values():
        for part, rows in found:
            for number, row in enumerate(rows, 1):
                if unknown := set(row) - known:
                    source = "training" if data.inference is None else f"the model {data.inference.model}"
                    raise RecipeError(
                        f"{part.row(number)}: data.label: the class {min(unknown)!r} is none of {source}. "
                        f"Its classes: {list_labels(classes)}."
                    )
    ids = {
        role: [[float(name in row) for name in classes] for _, rows in found for row in rows]
        for role, found in named.items()
    }
    return Labels(ids, list(classes), [], [])


def _names(part: Table, data: TextData) -> list[Iterable[str]]:
    """The classes of each row."""
    if data.several:
        table = {name: part.column("label", name) for name in data.labels}
        for name, values in table.items():
            for number, value in enumerate(values, 1):
                if _switch(value) is None:
                    raise RecipeError(
                        f"{part.row(number)}: column {name!r} (data.label) holds {show(value)}, expected 0 or 1."
                    )
        rows = zip(*table.values(), strict=True)
        return [{name for name, value in zip(table, row, strict=True) if _switch(value)} for row in rows]
    found: list[Iterable[str]] = []
    for number, value in enumerate(part.column("label", data.labels[0]), 1):
        if not isinstance(value, list | tuple) or not all(isinstance(name, str | Integral) for name in value):
            raise RecipeError(
                f"{part.row(number)}: column {data.labels[0]!r} (data.label) holds {show(value)}, expected a list of "
                "names (data.label_type=classes), as .jsonl and .parquet files can hold. Or name columns of 0 and 1: "
                "data.label=[A,B]."
            )
        names = part.classes
        found.append({names[name] if names is not None and isinstance(name, int) else str(name) for name in value})
    return found
