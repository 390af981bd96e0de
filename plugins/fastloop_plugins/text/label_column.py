"""Reads the column of labels of one part, and checks each cell.

Cells of csv and tsv files are text, so ``1`` may be a number or a name there. In other sources, a number is a number
and text is a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastloop.errors import RecipeError
from fastloop.problem import agree, counted_of
from fastloop_plugins._mapped import take, zeros
from fastloop_plugins.rows.column import Column, in_blocks
from fastloop_plugins.rows.drop import drop_line
from fastloop_plugins.rows.table import Table, is_missing, problem_of_text, propose_cast, same_name, show
from fastloop_plugins.text.label_names import Label, list_labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.options import DataOptions

EXACT = 2**53
"""The largest whole number up to which a float holds every one."""
WHOLE = re.compile(r"(0|-?[1-9][0-9]{0,17})(\.0*)?")
"""A text that is read as a whole number: 12, -1 or 1.0, but not 01, which is the name of a class."""
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""A text that is a number of any kind."""
DIGITS = re.compile(r"[0-9]+")

Kind = Literal["number", "fraction", "text"]


@dataclass
class LabelledRow:
    """A row and its label, for a message.

    Attributes:
        place: The name of the row: file and line.
    """

    place: str
    label: Label


@dataclass
class PartLabels:
    """The labels of one part.

    Attributes:
        labels: The different ones, in the order of their first rows. Equal ones may be among them.
        codes: (rows,) int32, the place of each row's label in ``labels``.
    """

    part: Table
    labels: Sequence[Label]
    codes: NDArray[np.int32]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.part)

    def renamed(self, names: Mapping[str, Label]) -> PartLabels:
        """The same rows with the names of their labels. A label without a name stays."""
        return replace(self, labels=[names.get(str(label), label) for label in self.labels])

    def first_row_with(self, wanted: Container[Label]) -> LabelledRow | None:
        """The first row of the first label that is one of these; None if there is none."""
        for code, label in enumerate(self.labels):
            if label in wanted:
                row = int((self.codes == code).argmax())
                return LabelledRow(self.part.row(row + 1), label)
        return None

    def ids(self, table: Mapping[Label, int | None]) -> NDArray[np.int64]:
        """(rows,) the id that ``table`` gives the label of each row."""
        id_of_code = np.array([table[label] for label in self.labels], np.int64)
        return take(id_of_code, self.codes)

    def kind(self, label: Label) -> Kind:
        """Whether a label is a whole number, a number with a fraction, or text."""
        if isinstance(label, int):
            return "number"
        if not self.part.untyped:
            return "text"
        if WHOLE.fullmatch(label):
            return "number"
        if NUMBER.fullmatch(label) and not DIGITS.fullmatch(label):
            return "fraction"
        return "text"  # 01 is digits that are no whole number: a name

    def of_kind(self, kind: Kind) -> set[Label]:
        """The labels of a kind."""
        return {label for label in self.labels if self.kind(label) == kind}


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
    if isinstance(value, str):
        return value == ""
    return is_missing(value) and not isinstance(value, list | tuple)


def plain(value: Any) -> Label:
    """A label of the data as text or a whole number: ``true`` for True, and 1 for 1.0."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    return int(value)


def map_key(label: Any) -> str:
    """A label as a key of ``data.label_map``; empty for a row without one."""
    return "" if is_unlabelled(label) else str(plain(label))


def mapped_names(options: DataOptions) -> dict[str, Label]:
    """Label as text -> the name or number that ``data.label_map`` gives it."""
    names: dict[str, Label] = {}
    for label, name in (options.label_map or {}).items():
        if name is not None:
            names[map_key(label)] = name
    return names


def name_column(options: DataOptions) -> str:
    """The column of labels, for messages."""
    return f"column {options.label!r} (data.label)"


def leave_out_unlabelled(part: Table, column: str) -> str:
    """The end of an error about a row without a label: the line that leaves such rows out, and how many it leaves out.
    It also leaves out rows whose label is a text of spaces."""
    line = drop_line(column, "empty: true")
    if part.sampled and not part.label_counts:
        return line
    if part.sampled:
        count = sum(rows for label, rows in part.label_counts.items() if is_missing(label))
        total = sum(part.label_counts.values())
    else:
        count = sum(map(is_missing, part.column("label", column)))
        total = len(part)
    return f"{counted_of(count, total, 'rows')} {agree(count, 'has', 'have')} none. {line}"


def read_label_column(part: Table, options: DataOptions, notes: list[str]) -> PartLabels:
    """The labels of one part: text or whole numbers.

    Args:
        notes: Gets a line if the part has floats that are read as whole numbers.

    Raises:
        RecipeError: A row has no label, a cell can be no label, or a row holds the names of the columns.
    """
    cells = part.column("label", str(options.label))
    codes = zeros(len(cells), np.int32)
    try:
        different = _number_cells(cells, codes)
    except TypeError:  # a list or a mapping is no key of a dictionary
        different = []
    if not different or not all(map(is_label, different)):
        _check_cells(part, cells, options)
    texts = [cell for cell in different if isinstance(cell, str)]
    if same_name(str(options.label)) in map(same_name, texts):
        _refuse_header(part, cells, options)
    floats = {cell for cell in different if not isinstance(cell, str | Integral)}
    if floats:
        notes.append(_describe_whole_numbers(part, options, floats))
    return PartLabels(part, [plain(cell) for cell in different], codes)


def convert_numbers(values: PartLabels, options: DataOptions, notes: list[str]) -> PartLabels:
    """The cells of an untyped part as numbers: 1 for the text ``1`` or ``1.0``.

    Args:
        notes: Gets a line if a text such as ``1.0`` is read as a whole number.
    """
    if not values.part.untyped:
        return values
    numbers: list[Label] = []
    written_as_floats: set[Label] = set()
    for label in values.labels:
        if isinstance(label, str) and WHOLE.fullmatch(label):
            numbers.append(whole_number(label))
            if "." in label:
                written_as_floats.add(label)
        else:
            numbers.append(label)
    if written_as_floats:
        notes.append(_describe_whole_numbers(values.part, options, written_as_floats))
    return replace(values, labels=numbers)


def whole_number(text: str) -> int:
    """The number of a text that ``WHOLE`` matches: 2 for ``2.00``."""
    digits, _, _ = text.partition(".")
    return int(digits)


def _number_cells(cells: Column, codes: NDArray[np.int32]) -> list[Any]:
    """The different cells, in the order of their first rows. Writes the place of each row's cell to ``codes``.

    For the cells ``[1, True, 1]``, it returns ``[1, True]`` and writes ``[0, 1, 0]``: 1, 1.0 and True are equal, but of
    different types.
    """
    place_of_cell: dict[tuple[type, Any], int] = {}
    for start, (block,) in in_blocks([cells]):
        places = [place_of_cell.setdefault((type(cell), cell), len(place_of_cell)) for cell in block]
        codes[start : start + len(block)] = places
    return [cell for _, cell in place_of_cell]


def _check_cells(part: Table, cells: Column, options: DataOptions) -> None:
    """Raise an error for the first cell that is no label."""
    column = name_column(options)
    for number, cell in enumerate(cells, 1):
        if is_unlabelled(cell):
            raise RecipeError(
                f"{column} is empty. Every row needs a label. {leave_out_unlabelled(part, str(options.label))}",
                code="missing-label",
                place=part.row(number),
            )
        problem = problem_of_text(cell) if isinstance(cell, str) else None
        if problem is not None:
            raise RecipeError(f"{column} {problem}", code="wrong-label", place=part.row(number))
        if not is_label(cell):
            raise RecipeError(
                f"{column} holds {show(cell)}, expected text, or whole numbers from 0.",
                code="wrong-label",
                place=part.row(number),
                remedy=_other_label_type(cell),
            )


def _other_label_type(cell: Any) -> str:
    """The remedy for a cell that is a label of another ``data.label_type``, or a decimal; empty for other cells."""
    if isinstance(cell, list):
        return " If these are labels: data.label_type=classes."
    if isinstance(cell, Real):
        return " If these are labels: data.label_type=number."
    return propose_cast(cell)


def _refuse_header(part: Table, cells: Column, options: DataOptions) -> None:
    """Raise an error for a row that holds the names of the columns of the label and of the text."""
    column = options.text if isinstance(options.text, str) else options.text[0]
    label_name = same_name(str(options.label))
    text_name = same_name(column)
    for number, (label, text) in enumerate(zip(cells, part.column("text", column), strict=True), 1):
        if not isinstance(label, str) or not isinstance(text, str):
            continue
        if same_name(label) == label_name and same_name(text) == text_name:
            raise RecipeError(
                f"found the column names ({text}, {label}), as where files were joined.",
                code="header-in-rows",
                place=part.row(number),
                remedy="Remove that row.",
            )


def _describe_whole_numbers(part: Table, options: DataOptions, labels: Collection[Label]) -> str:
    return f"{part.where}: {name_column(options)}: {list_labels(labels)} are read as whole numbers"
