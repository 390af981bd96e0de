"""Converts labels of the text tasks to classes 0..n-1.

Cells of csv and tsv files are text. If all labels are whole numbers (1 or 1.0), they are read as numbers; others, such
as 01 and 02, are names of classes. In other sources, a number is a number and text is a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import RecipeError
from fastloop_plugins._mapped import concatenate
from fastloop_plugins.rows.table import Table, same_name
from fastloop_plugins.text.label_column import (
    DIGITS,
    WHOLE,
    Kind,
    LabelledRow,
    PartLabels,
    convert_numbers,
    mapped_names,
    name_column,
    read_label_column,
    whole_number,
)
from fastloop_plugins.text.label_lists import find_label_lists
from fastloop_plugins.text.label_names import SHOWN, Label, has_unnamed_classes, list_labels, written_label
from fastloop_plugins.text.label_warnings import find_alike, warn_about_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.options import DataOptions

FIRST_TRIAL = 10
"""Classes: up to this number, each class may have a single row, as in a first trial."""
NEARLY_EVERY_ROW = 0.9
"""Classes per row from which the column is assumed not to hold labels."""


@dataclass
class Labels:
    """The labels of all splits.

    Attributes:
        by_role: Role -> the label of each row, by ``data.label_type``. ``class``: (rows,), int64, from 0. ``number``:
            (rows,), float64. ``classes``: (rows, classes), float32, 1.0 for each class of the row and 0.0 for others.
        classes: Names of the classes; for numbers, the name of the model's single output.
        warnings: Classes that are probably mistakes.
        notes: How labels were read, if that is not obvious from the file.
    """

    by_role: dict[str, NDArray[Any]]
    classes: list[str]
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Classes:
    """The classes of the training split.

    Attributes:
        ids: Label -> class, 0..n-1.
        names: The name of each class.
    """

    ids: dict[Label, int]
    names: list[str]


def number_labels(parts: Mapping[str, list[Table]], options: DataOptions, where: str) -> Labels:
    """Assign a class to each label of the training split, and to each row of every split.

    Args:
        parts: Role (``train`` among them) -> its parts.
        where: The ``data`` section, for messages.

    Raises:
        RecipeError: A row has no label, labels mix types, numbers have gaps, or training has no row of a class.
    """
    notes: list[str] = []
    values: dict[str, list[PartLabels]] = {}
    for role, tables in parts.items():
        values[role] = [read_label_column(table, options, notes) for table in tables]
    names = mapped_names(options)
    if names:
        _check_mapped_names(values, names, f"{where}.label_map")
        for role, labels in values.items():
            values[role] = [part.renamed(names) for part in labels]
    if _are_numbers(values["train"], name_column(options)):  # every split is read by the rule of train
        for role, labels in values.items():
            values[role] = [convert_numbers(part, options, notes) for part in labels]

    files = ", ".join(table.where for table in parts["train"])
    dataset_names = None if names else parts["train"][0].class_names.get(str(options.label))
    classes = _classes_of_train(values["train"], dataset_names, options, files, notes)
    ids = {}
    for role, labels in values.items():
        _check_known(labels, classes, role, options)
        ids[role] = concatenate([part.ids(classes.ids) for part in labels])
    warnings = [f"{files}: {warning}" for warning in warn_about_classes(ids["train"], classes.names)]
    return Labels(ids, classes.names, warnings, notes)


def labels_of_model(parts: Mapping[str, list[Table]], options: DataOptions, classes: list[str], model: str) -> Labels:
    """Give each row the id of its label in a trained model. A row may lack any of the classes.

    A label is a class if their names are equal, or else equal except for case and spaces. Other whole numbers are ids,
    from ``data.label_offset``.

    Args:
        classes: The model's class names, in the order of its ids.
        model: The model, for messages.

    Raises:
        RecipeError: A row has no label, or one that is no class of the model.
    """
    notes: list[str] = []
    names = mapped_names(options)
    model_classes = _ModelClasses(classes, options.label_offset)
    ids: dict[str, NDArray[Any]] = {}
    for role, tables in parts.items():
        ids_of_parts = []
        for table in tables:
            values = read_label_column(table, options, notes)
            own_names = table.class_names.get(str(options.label))
            is_named = own_names is not None and not has_unnamed_classes(classes, own_names)
            if own_names is not None and is_named and not _has_number(names, own_names, options.label_offset):
                values = _named_by_dataset(values, own_names, options.label_offset)
            values = values.renamed(names)
            class_ids = {label: model_classes.find(label, table.untyped) for label in values.labels}
            unknown = values.first_row_with({label for label, index in class_ids.items() if index is None})
            if unknown is not None:
                raise RecipeError(
                    f"{name_column(options)} holds {unknown.label!r}, which is no class of the model {model}. "
                    f"Its classes: {list_labels(classes)}.",
                    code="unknown-label",
                    place=unknown.place,
                    remedy=f"To rename a label: data.label_map={{{written_label(unknown.label)}: CLASS}}.",
                )
            ids_of_parts.append(values.ids(class_ids))
        ids[role] = concatenate(ids_of_parts)
    return Labels(ids, classes, notes=notes)


class _ModelClasses:
    """Finds labels among the classes of a trained model.

    Args:
        names: The names of the classes, in the order of their ids.
        offset: The number that the data gives the first class.
    """

    def __init__(self, names: Sequence[str], offset: int) -> None:
        self.count = len(names)
        self.offset = offset
        self.ids: dict[str, int] = {}
        keys = [same_name(name) for name in names]
        if len(set(keys)) == len(names):  # otherwise two classes differ only by case or spaces
            self.ids.update((key, index) for index, key in enumerate(keys))
        self.ids.update((name, index) for index, name in enumerate(names))

    def find(self, label: Label, untyped: bool) -> int | None:
        """The id of a label; None: the model has no such class.

        Args:
            untyped: Whether every cell of the file is text, so that a text may be a number.
        """
        if untyped and isinstance(label, str) and label not in self.ids and WHOLE.fullmatch(label):
            label = whole_number(label)
        for name in (str(label), same_name(str(label))):
            if name in self.ids:
                return self.ids[name]
        if isinstance(label, str):
            return None
        index = label - self.offset
        return index if 0 <= index < self.count else None


def _has_number(keys: Iterable[str], classes: Sequence[str], offset: int) -> bool:
    """Whether keys of ``data.label_map`` are numbers of the classes, and not their names."""
    numbers = {str(number) for number, _ in enumerate(classes, offset)}
    return not numbers.isdisjoint(keys)


def _named_by_dataset(values: PartLabels, names: Sequence[str], offset: int) -> PartLabels:
    """Labels with the names that the dataset gives its numbers, as its features define them."""
    name_of_number = dict(enumerate(names, offset))
    named: list[Any] = []
    for label in values.labels:
        number = label
        if isinstance(label, str) and values.part.untyped and label not in names and WHOLE.fullmatch(label):
            number = whole_number(label)
        if isinstance(number, int):
            named.append(name_of_number.get(number, label))
        else:
            named.append(label)
    return replace(values, labels=named)


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_mapped_names(values: Mapping[str, list[PartLabels]], names: Mapping[str, Label], where: str) -> None:
    """Raise an error for a label of ``data.label_map`` that no row has."""
    labels: set[Label] = set()
    for parts in values.values():
        for part in parts:
            labels.update(part.labels)
    unknown = names.keys() - set(map(str, labels))
    if unknown:
        raise RecipeError(
            f"the label {min(unknown)!r} never occurs. There: {list_labels(labels)}.",
            code="unknown-label",
            place=where,
            remedy="Correct it, or remove it from data.label_map.",
        )


def _check_known(values: Sequence[PartLabels], classes: Classes, role: str, options: DataOptions) -> None:
    """Raise an error for a label of a split that never occurs in training."""
    for part in values:
        unknown = part.first_row_with(set(part.labels) - classes.ids.keys())
        if unknown is None:
            continue
        written = written_label(unknown.label)
        remedy = ""
        alike = find_alike(unknown.label, classes.ids)
        if alike is not None:
            remedy = f" If they are one class: data.label_map={{{written}: {written_label(alike)}}}."
        remedy += f" To leave out its rows: data.label_map={{{written}: null}}."
        remedy += f" To leave this split out: data.splits.{role}=null."
        raise RecipeError(
            f"{name_column(options)} holds {unknown.label!r}, which never occurs in training. "
            f"There: {list_labels(classes.ids)}.",
            code="unknown-label",
            place=unknown.place,
            remedy=remedy,
        )


# -- whether labels are numbers ----------------------------------------------------------------------------------------


def _are_numbers(values: Sequence[PartLabels], column: str) -> bool:
    """Whether the labels of the training split are numbers.

    Raises:
        RecipeError: They are of several kinds, or have fractions.
    """
    labels_of_kind: dict[Kind, set[Label]] = {}
    for part in values:
        for label in part.labels:
            labels_of_kind.setdefault(part.kind(label), set()).add(label)
    if "fraction" in labels_of_kind:
        row = _first_of_kind(values, "fraction")
        raise RecipeError(
            f"{column} holds {row.label!r}, expected text, or whole numbers from 0.",
            code="wrong-label",
            place=row.place,
            remedy="Or name it: data.label_map. For regression: data.label_type=number.",
        )
    if len(labels_of_kind) < 2:
        return "number" in labels_of_kind
    if _are_codes_of_one_width(values):
        return False
    raise _mixed_labels(values, labels_of_kind, column)


def _are_codes_of_one_width(values: Sequence[PartLabels]) -> bool:
    """Whether all labels are digits of the same number of characters, such as 01 to 12: names, although 10 is also a
    whole number."""
    widths: set[int] = set()
    for part in values:
        for label in part.labels:
            if not part.part.untyped or not DIGITS.fullmatch(str(label)):
                return False
            widths.add(len(str(label)))
    return len(widths) == 1


def _first_of_kind(values: Sequence[PartLabels], kind: Kind) -> LabelledRow:
    for part in values:
        row = part.first_row_with(part.of_kind(kind))
        if row is not None:
            return row
    raise ValueError(f"no label is of the kind {kind}")


def _mixed_labels(values: Sequence[PartLabels], labels_of_kind: Mapping[Kind, Set[Label]], column: str) -> RecipeError:
    """The error about labels that are text and numbers. It proposes names for those of the rarer kind."""
    text_row = _first_of_kind(values, "text")
    number_row = _first_of_kind(values, "number")
    rarer = min(labels_of_kind["text"], labels_of_kind["number"], key=len)
    pairs: list[str] = []
    for label in sorted(rarer, key=str)[:SHOWN]:
        pairs.append(f"{written_label(label)}: {_number_beside_spaces(label) or 'NAME'}")
    remedy = f"Write all one way, or name them: data.label_map={{{', '.join(pairs)}}}."
    rows: dict[str, int] = {}
    for part in values:
        counts = np.bincount(part.codes, minlength=len(part.labels))
        for label, count in zip(part.labels, counts.tolist(), strict=True):
            rows[str(label)] = rows.get(str(label), 0) + count
    lists = find_label_lists(rows)
    if lists is not None:
        remedy = lists.describe()
    return RecipeError(
        f"{column} mixes text and numbers: it holds {text_row.label!r}, and {number_row.place} holds "
        f"{number_row.label!r}.",
        code="mixed-labels",
        place=text_row.place,
        remedy=remedy,
    )


def _number_beside_spaces(label: Label) -> str:
    """The number in a label that has spaces around it, as in '4 '; empty if there is none."""
    text = str(label).strip()
    return text if text != label and DIGITS.fullmatch(text) else ""


# -- classes -----------------------------------------------------------------------------------------------------------


def _classes_of_train(
    values: Sequence[PartLabels],
    dataset_names: Sequence[str] | None,
    options: DataOptions,
    files: str,
    notes: list[str],
) -> Classes:
    """The classes of the labels of the training split.

    Args:
        dataset_names: The names of the classes, if the features of the dataset define them.
        files: The files of the training split, for messages.
        notes: Gets a line about ``data.label_offset``.
    """
    labels: list[Label] = []
    for part in values:
        labels.extend(part.labels)
    different = set(labels)
    column = name_column(options)
    if dataset_names is None:
        _check_few_classes(labels, sum(map(len, values)), column, files)
    if len(different) < 2:
        raise RecipeError(
            f"{column} holds only the label {list_labels(different)}.",
            code="one-class",
            place=files,
            expected="at least two",
            remedy="Add rows of other classes, or name another column in data.label.",
        )
    if isinstance(labels[0], str):
        return _classes_of_texts(different, options, files)
    classes = _classes_of_numbers(different, dataset_names, options, files)
    offset = options.label_offset
    if offset:
        last = len(classes.names) - 1
        notes.append(f"{files}: {column}: {offset} to {offset + last} are the classes 0 to {last} (data.label_offset)")
    return classes


def _check_few_classes(labels: Sequence[Label], rows: int, column: str, files: str) -> None:
    """Raise an error if nearly every row would be a class of its own."""
    different = len(set(labels))
    if different <= FIRST_TRIAL or different < NEARLY_EVERY_ROW * rows:
        return
    raise RecipeError(
        f"{column} has {different} different labels in {rows} rows, such as {labels[0]!r:.60}: nearly every row "
        "would be a class of its own. Expected a column with few different values.",
        code="too-many-labels",
        place=files,
        remedy=_remedy_for_many_classes(labels),
    )


def _remedy_for_many_classes(labels: Sequence[Label]) -> str:
    """The option that reads labels of nearly every row another way; empty if there is none."""
    if not isinstance(labels[0], str):
        return " For regression: data.label_type=number."
    lists = find_label_lists(Counter(map(str, labels)))
    return "" if lists is None else f" {lists.describe()}"


def _classes_of_texts(labels: Set[Label], options: DataOptions, files: str) -> Classes:
    """The classes of names, in alphabetical order."""
    if options.label_offset:
        raise RecipeError(
            f"{name_column(options)} holds text ({list_labels(labels)}), and data.label_offset is for numbers.",
            code="unknown-option",
            place=files,
            remedy="Remove it.",
        )
    names = sorted(map(str, labels))
    return Classes({name: index for index, name in enumerate(names)}, names)


def _classes_of_numbers(
    labels: Set[Label], dataset_names: Sequence[str] | None, options: DataOptions, files: str
) -> Classes:
    """The classes of whole numbers: label 1 is the class 0 with ``data.label_offset: 1``."""
    offset = options.label_offset
    count = len(labels if dataset_names is None else dataset_names)
    ids: dict[Label, int] = {index + offset: index for index in range(count)}
    if not labels <= ids.keys():
        raise RecipeError(
            f"{name_column(options)} holds the labels {list_labels(labels)}, expected {offset} to {offset + count - 1} "
            "without gaps.",
            code="gaps-in-labels",
            place=files,
            remedy=_remedy_for_gaps(labels),
        )
    if dataset_names is None:
        return Classes(ids, [str(label) for label in ids])
    return Classes(ids, list(dataset_names))


def _remedy_for_gaps(labels: Set[Label]) -> str:
    if labels == set(range(1, len(labels) + 1)):
        return "They count from 1: give data.label_offset=1."
    if len(labels) > 2 and labels == set(range(-1, len(labels) - 1)):
        return (
            "If -1 marks rows without a label, leave them out: data.label_map={-1: null}. Or name it: "
            "data.label_map={-1: NAME}."
        )
    return "Renumber them, or name them: data.label_map={NUMBER: NAME}."
