"""Numbers the classes of each split as the training split does: those of the labels, and of columns of ``data.drop``.

The features of a dataset or of its files name the classes, and two splits, or two files of a split, may list the same
names in another order. ``data.label_map`` and ``data.drop`` have numbers of the training split, so its order holds for
all splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins.rows.column import Column
from fastloop_plugins.rows.table import Table
from fastloop_plugins.text.label_column import WHOLE, map_key
from fastloop_plugins.text.label_names import Label, written_label

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData


def merge_names(names_of_parts: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Column -> the names of the training split, in the order in which its parts list them first.

    For example, ``[neg, pos]`` and ``[pos, neg, mixed]`` give ``[neg, pos, mixed]``.
    """
    merged = dict[str, dict[str, None]]()  # column -> its names, as an ordered set
    for names_of_part in names_of_parts:
        for column, of_part in names_of_part.items():
            merged.setdefault(column, {}).update(dict.fromkeys(of_part))
    return {column: list(names) for column, names in merged.items()}


def number_as_train(
    parts: Mapping[str, list[Table]], names_of_train: Mapping[str, Sequence[str]], data: TextData
) -> dict[str, list[Table]]:
    """The parts with the numbers of the training split in the columns of ``numbered_columns``. A class that training
    lacks has its name there. Numbers without names are those of the training split.

    Args:
        parts: Split -> its parts.
        names_of_train: See ``merge_names``.

    Raises:
        RecipeError: See ``_refuse_unnamed_numbers``.
    """
    result = {split: list(tables) for split, tables in parts.items()}
    for column, key in numbered_columns(data).items():
        _refuse_unnamed_numbers(parts, column, data.splits.train)
        if column not in names_of_train:
            continue
        names = list(names_of_train[column])
        number_of_name: dict[str, Label] = {name: number for number, name in numbered(names, column, data)}
        for tables in result.values():
            for index, part in enumerate(tables):
                own_names = part.class_names.get(column)
                if own_names is None:
                    tables[index] = replace(part, class_names={**part.class_names, column: names})
                elif list(own_names) != names:
                    values = {}
                    for number, name in numbered(own_names, column, data):
                        values[number] = number_of_name.get(name, name)
                    tables[index] = _with_values(part, column, key, values, names)
    return result


def _refuse_unnamed_numbers(parts: Mapping[str, list[Table]], column: str, train: str) -> None:
    """Raise an error for numbers without names if the parts of the training split name the same number in two ways. If
    none of them has names, the parts of the other splits must agree."""
    every = list(chain.from_iterable(parts.values()))
    unnamed = [part for part in every if column in part.columns and column not in part.class_names]
    if not unnamed:
        return
    named = [part for part in parts.get(train, []) if column in part.class_names]
    if not named:
        named = [part for part in every if column in part.class_names]
    difference = _find_difference(named, column)
    if difference is None:
        return
    number, first, second = difference
    for part in unnamed:
        if _has_numbers(part, column):
            raise RecipeError(
                f"column {column!r} has numbers without names. The number {number} stands for "
                f"{first.class_names[column][number]!r} in {first.where}, and for "
                f"{second.class_names[column][number]!r} in {second.where}.",
                code="mixed-labels",
                place=part.where,
                remedy="Write that column with names in place of numbers.",
            )


def _find_difference(named: Sequence[Table], column: str) -> tuple[int, Table, Table] | None:
    """The first number of a column that two parts name in two ways, and the parts; None: there is none."""
    part_of_number = dict[int, Table]()  # the first part that names it
    for part in named:
        for number, name in enumerate(part.class_names[column]):
            first = part_of_number.setdefault(number, part)
            if name != first.class_names[column][number]:
                return number, first, part
    return None


def _has_numbers(part: Table, column: str) -> bool:
    """Whether a column has a whole number, or a list with one."""
    for value in part.columns[column]:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) or (part.untyped and WHOLE.fullmatch(str(item))):
                return True
    return False


def name_classes(parts: Mapping[str, list[Table]], data: TextData) -> dict[str, list[Table]]:
    """The parts with names in place of the numbers of their classes, for a trained model: the source has not the
    training split of the model, so the order of that one is not known.

    Raises:
        RecipeError: An option has the number of a class.
    """
    needed = data.needed_splits(parts).values()
    result = {split: list(tables) for split, tables in parts.items()}
    for column, key in numbered_columns(data).items():
        for split, tables in result.items():
            for index, part in enumerate(tables):
                if column not in part.class_names or split not in needed:
                    continue
                names = dict(numbered(part.class_names[column], column, data))
                _refuse_numbers(names, part, column, data)
                tables[index] = _with_values(part, column, key, names, None)
    return result


def numbered_columns(data: TextData) -> dict[str, str]:
    """The column of labels, if they are classes, and those of ``data.drop`` -> the option that names it."""
    columns = data.drop.columns()
    for name, key in data.label_columns().items():
        columns.pop(name, None)
        if data.label_type != "number" and not data.several:
            columns[name] = key
    return columns


def numbered(names: Iterable[str], column: str, data: TextData) -> enumerate[str]:
    """The number and the name of each class of a column of a split."""
    return enumerate(names, data.options.label_offset if column in data.labels else 0)


def _with_values(
    part: Table, column: str, key: str, value_of_number: Mapping[int, Label], names: list[str] | None
) -> Table:
    """A part with other values in place of numbers. A number that is not listed stays, such as -1.

    Args:
        names: The names of the classes after that; None: the values are names.
    """

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return value_of_number.get(value, value) if isinstance(value, int) else value

    class_names = {name: of_column for name, of_column in part.class_names.items() if name != column}
    if names is not None:
        class_names[column] = names
    columns = {**part.columns, column: Column(map(replaced, part.column(key, column)))}
    return replace(part, columns=columns, class_names=class_names)


def _refuse_numbers(names: Mapping[int, str], part: Table, column: str, data: TextData) -> None:
    """Raise an error for the number of a class in ``data.drop``, or in a ``data.label_map`` that lacks its name.

    Args:
        names: The names of the numbers of the part.
        column: Their column.
    """
    mapped: set[str] = set()
    if column in data.labels:
        mapped = {map_key(label) for label in data.options.label_map or {}}
    dropped: set[str] = set()
    for condition in data.drop.conditions:
        if condition.column == column and condition.key == "equals":
            values = condition.equals if isinstance(condition.equals, list) else [condition.equals]
            dropped.update(map(map_key, values))
    for number, name in names.items():
        key = str(number)
        is_named = name in mapped and not name.isdecimal()
        if key in dropped:
            place = "drop"
            remedy = f"Write its name in place of the number: {written_label(name)}."
        elif key in mapped and not is_named:
            place = "label_map"
            remedy = f"Map its name, too: data.label_map={{{written_label(name)}: CLASS}}."
        else:
            continue
        reason = f"The split {data.splits.train!r}, whose features say which class that is, cannot be read"
        if data.inference is not None and not data.inference.is_own_data:
            reason = "The data is not that of the run, whose training split says which class that is"
        raise RecipeError(
            f"it has the number {number} of a class. {reason}: the number stands for {name!r} in {part.where}.",
            code="unknown-split",
            place=f"{data.where}.{place}",
            remedy=remedy,
        )
