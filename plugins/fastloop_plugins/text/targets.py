"""Reads the labels of text tasks by ``data.label_type``: ``read_labels``.

This module reads numbers, and any number of classes a row. It calls ``text.labels`` for one class a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import RecipeError, did_you_mean
from fastloop.problem import agree, counted, counted_of
from fastloop_plugins._mapped import concatenate, spans, take, zeros
from fastloop_plugins.rows.table import Table, propose_cast, show
from fastloop_plugins.text.label_column import NUMBER, is_label, is_unlabelled, leave_out_unlabelled
from fastloop_plugins.text.label_names import count_classes, list_labels, refuse_broken_names, written_label
from fastloop_plugins.text.label_warnings import find_alike, warn_about_alike_names
from fastloop_plugins.text.labels import Labels, labels_of_model, number_labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.data import TextData

ADVICE = " (data.label_type=number). For classes: data.label_type=class"
"""The end of the error for a label of a regression."""
ONLY = "LABEL_0"
"""Name of the single output of a regression, as transformers names it."""
EXACT_IN_FLOAT32 = 2**24
"""The largest whole number up to which float32 holds every one."""
INDICATORS = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0}
"""Text of a cell in lower case -> its value, in a column such as ``toxic`` that holds 1 for the rows of a class."""


def read_labels(parts: Mapping[str, list[Table]], data: TextData) -> Labels:
    """The labels of all splits. In inference, by the classes of the model: ``data.classes``.

    Raises:
        RecipeError: A label has another form than ``data.label_type``, or is no class.
    """
    if data.label_type == "number":
        numbers = {}
        for role, tables in parts.items():
            numbers[role] = concatenate([read_numbers(table, data.labels[0], "data.label", ADVICE) for table in tables])
        warnings = []
        if "train" in parts:
            files = ", ".join(table.where for table in parts["train"])
            warnings = [f"{files}: {warning}" for warning in _warn_about_rounding(numbers["train"], data.labels[0])]
        return Labels(numbers, [ONLY], warnings)
    if data.label_type == "classes":
        return _class_sets(parts, data)
    if data.inference is None:
        return number_labels(parts, data.options, data.where)
    return labels_of_model(parts, data.options, data.classes, str(data.inference.model))


def is_readable(value: Any, data: TextData) -> bool:
    """Whether a cell can be a label of ``data.label_type``."""
    if data.label_type == "number":
        return read_number(value) is not None
    if data.label_type != "classes":
        return is_label(value)
    if data.several:
        return _indicator(value) is not None
    return isinstance(value, list | tuple)


def summarize(labels: NDArray[Any], data: TextData) -> str:
    """The labels of the training split for the log: rows of each class, or the range of the numbers."""
    if data.label_type == "number":
        return f"labels in train: {labels.min():g} to {labels.max():g}, mean {labels.mean():g}"
    ids = np.nonzero(labels)[1] if data.label_type == "classes" else labels
    return f"rows of each class in train: {count_classes(ids, data.classes)}"


def read_number(value: Any, untyped: bool = True) -> float | None:
    """A finite number, or in ``untyped`` files a text that is one; None for anything else."""
    if isinstance(value, str):
        value = float(value) if untyped and NUMBER.fullmatch(value.strip()) else None
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def propose_point(value: Any) -> str:
    """The remedy for a text that is a number once its comma is a point, such as ``5,46``; empty for other values."""
    text = value.strip().replace(",", ".") if isinstance(value, str) else ""
    if text == value or not NUMBER.fullmatch(text):
        return ""
    return f" It has a decimal comma: write the numbers of the file with a point, such as {text}."


def read_numbers(part: Table, name: str, key: str, advice: str = "") -> NDArray[np.float64]:
    """The numbers of a column, which the option ``key`` names, (rows,).

    Raises:
        RecipeError: There is no such column, or a value is no finite number.
    """
    if name not in part.columns:
        hint = did_you_mean(name, part.all_names())
        raise RecipeError(
            f"there is no column {name!r}, which {key} names.{hint}", code="unknown-column", place=part.where
        )
    numbers = zeros(len(part), np.float64)
    for row, value in enumerate(part.columns[name]):
        number = read_number(value)
        if number is None or (isinstance(value, str) and not part.untyped):
            where = f"{part.row(row + 1)}: column {name!r} ({key})"
            remedy = propose_point(value) if part.untyped else propose_cast(value)
            if is_unlabelled(value):
                remedy = f" {leave_out_unlabelled(part, name)}"
            raise RecipeError(
                f"{where} holds {show(value)}, expected a finite number{'' if remedy else advice}.",
                code="wrong-label",
                remedy=remedy,
            )
        numbers[row] = number
    return numbers


def _warn_about_rounding(numbers: NDArray[np.float64], column: str) -> list[str]:
    """A warning about numbers that float32, in which the model gets them, has no exact value for, although they are
    whole, or as large as if they were.

    Args:
        numbers: (rows,).
        column: Their column, for messages.
    """
    count = 0
    example = ""
    for span in spans(len(numbers)):
        exact = numbers[span]
        with np.errstate(over="ignore"):  # above 3.4e38, float32 has inf
            rounded = exact.astype(np.float32).astype(np.float64)
        changed = np.flatnonzero((np.abs(exact) > EXACT_IN_FLOAT32) & (rounded != exact))
        if changed.size and not count:
            example = f"{exact[changed[0]]:.17g} becomes {rounded[changed[0]]:.17g}"
        count += changed.size
    if not count:
        return []
    return [
        f"{counted_of(count, len(numbers), 'numbers')} of column {column!r} (data.label) {agree(count, 'is', 'are')} "
        f"rounded in float32, in which the model gets them: {example}. Scale them: subtract their mean, and divide by "
        "their standard deviation."
    ]


def _indicator(value: Any) -> float | None:
    """Whether a row has the class of a column, as 0.0 or 1.0; None: the cell holds anything else."""
    if isinstance(value, Real):
        return float(value) if value in (0, 1) else None
    return INDICATORS.get(str(value).lower())


def _class_sets(parts: Mapping[str, list[Table]], data: TextData) -> Labels:
    """A row of 0.0 and 1.0 for each row of the data, in the order of the classes.

    Rows with equal sets share a code. For the rows [spam], [], [spam], the codes are [0, 1, 0].
    """
    sets: dict[frozenset[str], int] = {}  # different sets of names -> code
    codes: dict[str, list[NDArray[np.int32]]] = {}  # role -> the codes of each part, (rows,)
    for role, tables in parts.items():
        codes[role] = []
        for part in tables:
            part_codes = zeros(len(part), np.int32)
            for row, names in enumerate(_names(part, data)):
                part_codes[row] = sets.setdefault(names, len(sets))
            codes[role].append(part_codes)
    sets_by_code = list(sets)
    classes = data.classes if data.inference is not None else data.labels
    warnings: list[str] = []
    if data.inference is None and not data.several:
        used = set[str]()
        for part_codes in codes["train"]:
            for code in np.unique(part_codes):
                used |= sets_by_code[code]
        classes = sorted(used)
        where = ", ".join(part.where for part in parts["train"])
        refuse_broken_names(classes, f"{where}: data.label")
        if len(classes) < 2:
            raise RecipeError(
                f"column {data.labels[0]!r} (data.label) names {counted(len(classes), 'class')}.",
                code="one-class",
                place=where,
                expected="at least two",
                remedy="Add rows of other classes, or name another column in data.label.",
            )
        warnings = [f"{where}: {warning}" for warning in warn_about_alike_names(classes)]
    unknown = [code for code, names in enumerate(sets_by_code) if not names <= set(classes)]
    for role, tables in parts.items():
        for part, part_codes in zip(tables, codes[role], strict=True):
            bad = np.flatnonzero(np.isin(part_codes, unknown))
            if bad.size:
                unknown_classes = sets_by_code[part_codes[bad[0]]] - set(classes)
                source = "training" if data.inference is None else f"the model {data.inference.model}"
                name = min(unknown_classes)
                alike = find_alike(name, classes)
                remedy = ""
                if alike is not None:
                    remedy = f"If it is the class {written_label(alike)}, write it so, and not {written_label(name)}."
                raise RecipeError(
                    f"the class {name!r} is none of {source}. Its classes: {list_labels(classes)}.",
                    code="unknown-label",
                    place=f"{part.row(int(bad[0]) + 1)}: data.label",
                    remedy=remedy,
                )
    table = np.array([[name in names for name in classes] for names in sets_by_code], np.float32)  # (codes, classes)
    labels = {role: take(table, concatenate(of_parts)) for role, of_parts in codes.items()}
    return Labels(labels, list(classes), warnings)


def _names(part: Table, data: TextData) -> Iterator[frozenset[str]]:
    """Yield the classes of each row."""
    if data.several:
        table = {name: part.column("label", name) for name in data.labels}
        for name, values in table.items():
            for number, value in enumerate(values, 1):
                if _indicator(value) is None:
                    remedy = f" {leave_out_unlabelled(part, name)}" if is_unlabelled(value) else ""
                    raise RecipeError(
                        f"column {name!r} (data.label) holds {show(value)}, expected 0 or 1.",
                        code="wrong-label",
                        place=part.row(number),
                        remedy=remedy,
                    )
        for row in zip(*table.values(), strict=True):
            yield frozenset(name for name, value in zip(table, row, strict=True) if _indicator(value))
        return
    for number, value in enumerate(part.column("label", data.labels[0]), 1):
        if not isinstance(value, list | tuple) or not all(isinstance(name, str | Integral) for name in value):
            raise RecipeError(
                f"column {data.labels[0]!r} (data.label) holds {show(value)}, expected a list of names "
                "(data.label_type=classes), as .jsonl and .parquet files can hold.",
                code="wrong-label",
                place=part.row(number),
                remedy="Or name columns of 0 and 1: data.label=[A,B].",
            )
        yield frozenset(_class_name(part, data, number, name) for name in value)


def _class_name(part: Table, data: TextData, number: int, label: Any) -> str:
    """The name of a class of a row.

    Raises:
        RecipeError: Its number is none of the dataset's, which has names for its numbers.
    """
    names = part.class_names.get(data.labels[0])
    if names is None or not isinstance(label, int):
        return str(label)
    if not 0 <= label < len(names):
        raise RecipeError(
            f"found the class {label}, expected 0 to {len(names) - 1}: {list_labels(names)}.",
            code="unknown-label",
            place=f"{part.row(number)}: data.label",
        )
    return names[label]
