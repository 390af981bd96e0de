"""Converts labels of the text tasks to classes 0..n-1, and warns about suspicious labels.

Cells of csv and tsv files are text. If all labels are whole numbers (1 or 1.0), they are read as numbers; others, such
as 01 and 02, are names of classes. In other sources, a number is a number and text is a name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import RecipeError
from fastloop_plugins._mapped import concatenate, take, zeros
from fastloop_plugins.rows.column import in_blocks
from fastloop_plugins.rows.drop import drop_line
from fastloop_plugins.rows.table import Table, is_missing, problem_of_text, same_name, show, visible_name
from fastloop_plugins.text.label_names import MISSING, Label, written_label

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.options import DataOptions

FEW = 5
"""Rows: a class with fewer training rows gets a warning."""
MANY = 10
"""Classes: up to this number, each class may have a single row, as in a first trial."""
NEARLY = 0.9
"""Classes per row from which the column is assumed not to hold labels."""
SHOWN = 8
"""Labels that a message lists."""
EXACT = 2**53
"""The largest whole number up to which a float holds every one."""
WHOLE = re.compile(r"(0|-?[1-9][0-9]{0,17})(\.0*)?")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
DIGITS = re.compile(r"[0-9]+")


@dataclass
class Values:
    """The labels of one part.

    Attributes:
        labels: The different ones, in the order of their first rows. Equal ones may be among them.
        codes: (rows,) int32, the place of each row's label in ``labels``.
    """

    part: Table
    labels: Sequence[Label]
    codes: NDArray[np.int32]

    def renamed(self, names: Mapping[str, Label]) -> Values:
        """The same rows with the names of their labels, which are as they are without one."""
        return replace(self, labels=[names.get(str(label), label) for label in self.labels])

    def first(self, wanted: Container[Label]) -> tuple[str, Label] | None:
        """The name and the label of the first row with one of these labels; None if there is none."""
        for code, label in enumerate(self.labels):
            if label in wanted:
                return self.part.row(int((self.codes == code).argmax()) + 1), label
        return None

    def ids(self, table: Mapping[Label, int | None]) -> NDArray[np.int64]:
        """(rows,) the id that ``table`` gives the label of each row."""
        return take(np.array([table[label] for label in self.labels], np.int64), self.codes)


@dataclass
class Labels:
    """The labels of all splits, as classes."""

    ids: dict[str, NDArray[Any]]  # role -> class of each row, 0..n-1; or as ``text.targets`` reads them
    classes: list[str]  # names of the classes
    warnings: list[str]
    notes: list[str]  # how labels were read, if that is not obvious from the file


def is_label(value: Any) -> bool:
    """Whether a value can be a label: text, a boolean or a whole number. A float of ``EXACT`` or more stands for
    several."""
    if isinstance(value, str):
        return value != "" and problem_of_text(value) is None
    if isinstance(value, Integral):
        return True
    return isinstance(value, Real) and float(value).is_integer() and abs(float(value)) < EXACT


def is_unlabelled(value: Any) -> bool:
    """Whether a row has no label: null, NaN, or an empty text. A text of spaces is a label, and a list is no label."""
    return is_missing(value) and (value == "" or not isinstance(value, str | list | tuple))


def map_key(label: Any) -> str:
    """A label as a key of ``data.label_map``; empty for a row without one."""
    return "" if is_unlabelled(label) else str(plain(label))


def leave_out_unlabelled(part: Table, column: str) -> str:
    """The end of an error about a row without a label: how many there are, and the line that leaves them out."""
    line = drop_line(column, "empty: true")
    if part.sampled and not part.label_counts:
        return line
    if part.sampled:
        count = sum(rows for label, rows in part.label_counts.items() if is_unlabelled(label))
        total = sum(part.label_counts.values())
    else:
        count = sum(map(is_unlabelled, part.column("label", column)))
        total = len(part)
    return f"{count} of {total} rows have none. {line}"


def list_labels(labels: Iterable[Label]) -> str:
    """Labels for a message; only the first ones if there are many."""
    shown = [f"{label!r:.60}" for label in sorted(labels, key=lambda label: (isinstance(label, str), label))]
    listed = ", ".join(shown[:SHOWN])
    if len(shown) > SHOWN:
        listed += f" and {len(shown) - SHOWN} more"
    return listed


def count_classes(ids: Sequence[int] | NDArray[np.int64], classes: Sequence[str]) -> str:
    """``describe_counts`` of the rows of each class."""
    return describe_counts(np.bincount(np.asarray(ids, np.int64), minlength=len(classes)), classes)


def describe_counts(counts: NDArray[np.int64], classes: Sequence[str]) -> str:
    """The number of rows of each class, the largest class first: ``neg 36, pos 36, label 1``."""
    order = sorted(range(len(classes)), key=lambda index: (-counts[index], index))
    shown = [
        f"{classes[index] if classes[index].isidentifier() else repr(classes[index]):.40} {counts[index]}"
        for index in order
    ]
    return ", ".join(
        shown if len(shown) <= SHOWN else [*shown[: SHOWN - 1], f"{len(shown) - SHOWN} more", f"and {shown[-1]}"]
    )


def number_labels(parts: Mapping[str, list[Table]], options: DataOptions, where: str) -> Labels:
    """Assign a class to each label of the training split, and to each row of every split.

    Args:
        parts: Role (``train`` among them) -> its parts.
        where: The ``data`` section, for messages.

    Raises:
        RecipeError: A row has no label, labels mix types, numbers have gaps, or training has no row of a class.
    """
    what, notes = f"column {options.label!r} (data.label)", list[str]()
    values = {role: [_values(part, options, what, notes) for part in found] for role, found in parts.items()}
    if renamed := _names(options):
        values = _renamed(values, renamed, f"{where}.label_map")
    if _are_numbers(values["train"], what):
        values = {role: [_numbers(part, what, notes) for part in found] for role, found in values.items()}
    files = ", ".join(part.where for part in parts["train"])
    labels, rows = [label for part in values["train"] for label in part.labels], sum(map(len, parts["train"]))
    names = None if _names(options) else parts["train"][0].classes
    ids, classes = _classes(labels, rows, names, options.label_offset, files, what, notes)
    for role, found in values.items():
        for part in found:
            if unknown := part.first(set(part.labels) - ids.keys()):
                raise _unknown(*unknown, ids, role, what)
    found_ids = {role: concatenate([part.ids(ids) for part in found]) for role, found in values.items()}
    return Labels(found_ids, classes, [f"{files}: {line}" for line in _oddities(found_ids["train"], classes)], notes)


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
    what, notes = f"column {options.label!r} (data.label)", list[str]()
    ids = (
        {same_name(name): index for index, name in enumerate(classes)}
        if len({*map(same_name, classes)}) == len(classes)
        else {}
    )
    ids |= {name: index for index, name in enumerate(classes)}

    def find(part: Table, label: Label) -> int | None:
        """The id of a label; None: the model has no such class."""
        if isinstance(label, str) and part.untyped and label not in ids and WHOLE.fullmatch(label):
            label = int(label.partition(".")[0])
        name = str(label)
        if name in ids or same_name(name) in ids:
            return ids.get(name, ids.get(same_name(name)))
        if isinstance(label, str):
            return None
        index = label - options.label_offset
        return index if 0 <= index < len(classes) else None

    names, found = _names(options), dict[str, Any]()
    for role, those in parts.items():
        ids_of_parts = []
        for part in those:
            values = _values(part, options, what, notes).renamed(names)
            if part.classes is not None and not names:
                named = dict(enumerate(part.classes, options.label_offset))
                labels = [named.get(label, label) if isinstance(label, int) else label for label in values.labels]
                values = replace(values, labels=labels)
            table = {label: find(part, label) for label in values.labels}
            if unknown := values.first({label for label, index in table.items() if index is None}):
                row, label = unknown
                raise RecipeError(
                    f"{what} holds {label!r}, which is no class of the model {model}. Its classes: "
                    f"{list_labels(classes)}.",
                    code="unknown-label",
                    place=str(row),
                    remedy=f"To rename a label: data.label_map={{{written_label(label)}: CLASS}}.",
                )
            ids_of_parts.append(values.ids(table))
        found[role] = concatenate(ids_of_parts)
    return Labels(found, classes, [], notes)


# -- reading the column ------------------------------------------------------------------------------------------------


def _values(part: Table, options: DataOptions, what: str, notes: list[str]) -> Values:
    """The labels of one part: text or whole numbers."""
    values, distinct = part.column("label", str(options.label)), dict[tuple[type, Any], int]()
    codes = zeros(len(values), np.int32)
    try:  # 1, 1.0 and True are equal
        for start, (block,) in in_blocks([values]):
            places = [distinct.setdefault((type(value), value), len(distinct)) for value in block]
            codes[start : start + len(block)] = places
    except TypeError:  # a list or a mapping among them
        distinct = {}
    if not distinct or not all(is_label(value) for _, value in distinct):
        for number, value in enumerate(values, 1):
            if is_unlabelled(value):
                raise RecipeError(
                    f"{what} is empty. Every row needs a label. {leave_out_unlabelled(part, str(options.label))}",
                    code="missing-label",
                    place=part.row(number),
                )
            problem = problem_of_text(value) if isinstance(value, str) else None
            if problem is not None:
                raise RecipeError(f"{what} {problem}", code="wrong-label", place=part.row(number))
            if not is_label(value):
                kind = "classes" if isinstance(value, list) else "number" if isinstance(value, Real) else None
                remedy = f" If these are labels: data.label_type={kind}." if kind else ""
                raise RecipeError(
                    f"{what} holds {show(value)}, expected text, or whole numbers from 0.",
                    code="wrong-label",
                    place=part.row(number),
                    remedy=remedy,
                )
    if same_name(str(options.label)) in {same_name(value) for _, value in distinct if isinstance(value, str)}:
        column = options.text if isinstance(options.text, str) else options.text[0]
        names = [same_name(str(options.label)), same_name(column)]
        for number, (label, text) in enumerate(zip(values, part.column("text", column), strict=True), 1):
            cells = (label, text)
            if all(isinstance(cell, str) for cell in cells) and [*map(same_name, cells)] == names:
                raise RecipeError(
                    f"found the column names ({text}, {label}), as where files were joined.",
                    code="header-in-rows",
                    place=part.row(number),
                    remedy="Remove that row.",
                )
    if whole := {value for kind, value in distinct if not issubclass(kind, str | Integral)}:
        notes.append(f"{part.where}: {what}: {list_labels(whole)} are read as whole numbers")
    return Values(part, [plain(value) for _, value in distinct], codes)


def plain(value: Any) -> Label:
    """A label of the data as text or a whole number."""
    return str(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else int(value)


def _names(options: DataOptions) -> dict[str, Label]:
    """Label as text -> the name or number that ``data.label_map`` gives it."""
    names = dict[str, Label]()
    for label, name in (options.label_map or {}).items():
        if name is not None:
            names[map_key(label)] = name
    return names


def _renamed(values: dict[str, list[Values]], names: Mapping[str, Label], where: str) -> dict[str, list[Values]]:
    there = {label for found in values.values() for part in found for label in part.labels}
    if unknown := names.keys() - set(map(str, there)):
        raise RecipeError(
            f"the label {min(unknown)!r} never occurs. There: {list_labels(there)}.", code="unknown-label", place=where
        )
    return {role: [part.renamed(names) for part in found] for role, found in values.items()}


def _kind(part: Table, label: Label) -> str:
    if isinstance(label, int) or (part.untyped and WHOLE.fullmatch(label)):
        return "number"
    return "fraction" if part.untyped and NUMBER.fullmatch(label) and not DIGITS.fullmatch(label) else "text"


def _are_numbers(values: Sequence[Values], what: str) -> bool:
    """Whether the labels of the training split are numbers."""
    kinds = {_kind(found.part, label) for found in values for label in found.labels}

    def first(kind: str) -> tuple[str, Label]:
        rows = (found.first({one for one in found.labels if _kind(found.part, one) == kind}) for found in values)
        return next(filter(None, rows))

    if "fraction" in kinds:
        row, label = first("fraction")
        raise RecipeError(
            f"{what} holds {label!r}, expected text, or whole numbers from 0.",
            code="wrong-label",
            place=str(row),
            remedy="Or name it: data.label_map. For regression: data.label_type=number.",
        )
    if len(kinds) < 2:
        return kinds == {"number"}
    labels = {label for found in values for label in found.labels}
    if (
        all(found.part.untyped for found in values)
        and all(DIGITS.fullmatch(str(label)) for label in labels)
        and len({*map(len, map(str, labels))}) == 1
    ):
        return False  # codes of one width: 01 to 12
    (row, label), (other_row, other) = first("text"), first("number")
    by_kind = [
        {label for found in values for label in found.labels if _kind(found.part, label) == kind}
        for kind in ("text", "number")
    ]
    fewer = min(by_kind, key=len)
    names = ", ".join(
        f"{written_label(label)}: {_number_beside_spaces(label) or 'NAME'}" for label in sorted(fewer, key=str)[:SHOWN]
    )
    raise RecipeError(
        f"{what} mixes text and numbers: it holds {label!r}, and {other_row} holds {other!r}.",
        code="mixed-labels",
        place=str(row),
        remedy=f"Write all one way, or name them: data.label_map={{{names}}}.",
    )


def _number_beside_spaces(label: Any) -> str:
    """The number in a label that has spaces around it, as in '4 '; empty if there is none."""
    text = str(label).strip()
    return text if text != label and DIGITS.fullmatch(text) else ""


def _numbers(values: Values, what: str, notes: list[str]) -> Values:
    """Convert the cells of an untyped part to numbers."""
    if not values.part.untyped:
        return values
    table = {
        label: int(label.partition(".")[0]) if isinstance(label, str) and WHOLE.fullmatch(label) else label
        for label in values.labels
    }
    if whole := {label for label in table if isinstance(label, str) and "." in label and table[label] != label}:
        notes.append(f"{values.part.where}: {what}: {list_labels(whole)} are read as whole numbers")
    return replace(values, labels=[table[label] for label in values.labels])


# -- classes -----------------------------------------------------------------------------------------------------------


def _classes(
    labels: list[Label], rows: int, names: list[str] | None, offset: int, files: str, what: str, notes: list[str]
) -> tuple[dict[Label, int], list[str]]:
    """Label -> class, and the classes' names.

    Args:
        files: The files of the training split, for messages.
        what: The column, for messages.
    """
    seen = set(labels)
    if names is None and len(seen) > MANY and len(seen) >= NEARLY * rows:
        remedy = "" if isinstance(labels[0], str) else " For regression: data.label_type=number."
        raise RecipeError(
            f"{what} has {len(seen)} different labels in {rows} rows, such as {labels[0]!r:.60}: nearly every row "
            "would be a class of its own. Expected a column with few different values.",
            code="too-many-labels",
            place=files,
            remedy=remedy,
        )
    if len(seen) < 2:
        raise RecipeError(
            f"{what} holds only the label {list_labels(seen)}, expected at least two.", code="one-class", place=files
        )
    if isinstance(labels[0], str):
        if offset:
            raise RecipeError(
                f"{what} holds text ({list_labels(seen)}), and data.label_offset is for numbers.",
                code="unknown-option",
                place=files,
                remedy="Remove it.",
            )
        return {label: index for index, label in enumerate(sorted(seen, key=str))}, sorted(map(str, seen))
    ids: dict[Label, int] = {index + offset: index for index in range(len(names or seen))}
    if not seen <= ids.keys():
        counted = seen == set(range(1, len(seen) + 1))
        remedy = (
            "They count from 1: give data.label_offset=1."
            if counted
            else "Renumber them, or name them: data.label_map={NUMBER: NAME}."
        )
        if len(seen) > 2 and seen == set(range(-1, len(seen) - 1)):
            remedy = (
                "If -1 marks rows without a label, leave them out: data.label_map={-1: null}. Or name it: "
                "data.label_map={-1: NAME}."
            )
        raise RecipeError(
            f"{what} holds the labels {list_labels(seen)}, expected {offset} to {offset + len(ids) - 1} without gaps.",
            code="gaps-in-labels",
            place=files,
            remedy=remedy,
        )
    if offset:
        last = len(ids) - 1
        notes.append(f"{files}: {what}: {offset} to {offset + last} are the classes 0 to {last} (data.label_offset)")
    return ids, names or [str(label) for label in ids]


def _unknown(row: str, label: Label, ids: Mapping[Label, int], role: str, what: str) -> RecipeError:
    near = [other for other in ids if same_name(str(other)) == same_name(str(label))]
    own, remedy = written_label(label), ""
    if near:
        remedy = f" If they are one class: data.label_map={{{own}: {written_label(near[0])}}}."
    remedy += f" To leave out its rows: data.label_map={{{own}: null}}."
    remedy += f" To leave this split out: data.splits.{role}=null."
    return RecipeError(
        f"{what} holds {label!r}, which never occurs in training. There: {list_labels(ids)}.",
        code="unknown-label",
        place=str(row),
        remedy=remedy,
    )


def _common_names(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """The name that each group of equal names shares, for the names that differ from it. It has no needless spaces, and
    no characters that cannot be seen:
    ``{"Good": "good", "good ": "good"}`` for ``[["Good", "good", "good "]]``."""
    renamed = {}
    for group in groups:
        tidy = [name for name in group if name == visible_name(name)]
        common = tidy[-1] if tidy else visible_name(group[-1])
        for name in group:
            if name != common:
                renamed[name] = common
    return renamed


def _oddities(ids: NDArray[np.int64], classes: list[str]) -> list[str]:
    """Warnings about the classes of the training split, one line each."""
    counts, lines = np.bincount(ids, minlength=len(classes)), []
    few = sorted(
        (index for index in range(len(classes)) if counts[index] < FEW), key=lambda index: (counts[index], index)
    )
    if few:
        shown = ", ".join(f"{classes[index]!r:.40} has {counts[index]}" for index in few[:SHOWN])
        shown += f" and {len(few) - SHOWN} more" if len(few) > SHOWN else ""
        lines.append(
            f"classes with fewer than {FEW} rows to train on: {shown}. If they are mistakes, correct them, or give "
            "data.label_map"
        )
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(same_name(name), []).append(name)
    groups = [same for same in alike.values() if len(same) > 1]
    if groups:
        listed = " and the classes ".join(", ".join(map(written_label, same)) for same in groups)
        # one override for all groups: a second one would replace the first
        pairs = [f"{written_label(name)}: {written_label(common)}" for name, common in _common_names(groups).items()]
        lines.append(
            f"the classes {listed} differ only by case, spaces or characters that cannot be seen. If they are equal: "
            f"data.label_map={{{', '.join(pairs)}}}"
        )
    if missing := [name for name in classes if name.strip().lower() in MISSING]:
        remedy = f"If it is one, leave out its rows: data.label_map={{{written_label(missing[0])}: null}}"
        lines.append(f"the class {written_label(missing[0])} has the name of a missing value. {remedy}")
    return lines
