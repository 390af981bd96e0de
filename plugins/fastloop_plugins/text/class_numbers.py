"""Numbers the classes of each split as the training split does.

The features of a dataset name the classes of each split, and two splits may list the same names in another order.
``data.label_map`` and ``data.drop`` have numbers of the training split, so its order holds for all splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins.rows.column import Column
from fastloop_plugins.rows.table import Table
from fastloop_plugins.text.label_column import map_key
from fastloop_plugins.text.label_names import Label, written_label

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData


def number_as_train(
    parts: Mapping[str, list[Table]], names_of_train: Sequence[str] | None, data: TextData
) -> dict[str, list[Table]]:
    """The parts with the numbers of the training split in their column of labels. A class that training lacks has its
    name there.

    Args:
        parts: Split -> its parts.
        names_of_train: The names of the training split, in the order of their numbers; None: it has none.
    """
    if names_of_train is None:
        return dict(parts)
    number_of_name: dict[str, Label] = {name: number for number, name in numbered(names_of_train, data)}
    result: dict[str, list[Table]] = {}
    for split, tables in parts.items():
        result[split] = []
        for part in tables:
            if part.classes is not None and list(part.classes) != list(names_of_train):
                labels = {number: number_of_name.get(name, name) for number, name in numbered(part.classes, data)}
                part = replace(_with_labels(part, labels, data), classes=list(names_of_train))
            result[split].append(part)
    return result


def name_classes(parts: Mapping[str, list[Table]], data: TextData) -> dict[str, list[Table]]:
    """The parts with names in place of the numbers of their classes, for a trained model: the source has no training
    split, so its order is not known.

    Raises:
        RecipeError: An option has the number of a class.
    """
    needed = data.needed_splits(parts).values()
    result: dict[str, list[Table]] = {}
    for split, tables in parts.items():
        result[split] = []
        for part in tables:
            if part.classes is not None and split in needed:
                names = dict(numbered(part.classes, data))
                _refuse_numbers(names, part, data)
                part = replace(_with_labels(part, names, data), classes=None)
            result[split].append(part)
    return result


def numbered(names: Iterable[str], data: TextData) -> enumerate[str]:
    """The number and the name of each class of a split."""
    return enumerate(names, data.options.label_offset)


def _with_labels(part: Table, label_of_number: Mapping[int, Label], data: TextData) -> Table:
    """A part with other labels in place of numbers. A number that is not listed stays, such as -1."""
    name = data.labels[0]

    def replaced(value: Any) -> Any:
        return label_of_number.get(value, value) if isinstance(value, int) else value

    return replace(part, columns={**part.columns, name: Column(map(replaced, part.column("label", name)))})


def _refuse_numbers(names: Mapping[int, str], part: Table, data: TextData) -> None:
    """Raise an error for the number of a class in ``data.drop``, or in a ``data.label_map`` that lacks its name.

    Args:
        names: The names of the numbers of the part.
    """
    mapped = {map_key(label) for label in data.options.label_map or {}}
    dropped: set[str] = set()
    for condition in data.drop.conditions:
        if condition.column == data.labels[0] and condition.key == "equals":
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
        raise RecipeError(
            f"it has the number {number} of a class. There is no split {data.splits.train!r}, whose features say "
            f"which class that is: the number stands for {name!r} in {part.where}.",
            code="unknown-split",
            place=f"{data.where}.{place}",
            remedy=remedy,
        )
