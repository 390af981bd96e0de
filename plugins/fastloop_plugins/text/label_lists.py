"""Labels that are probably lists of classes, such as ``a,b`` beside ``a`` and ``b``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastloop_plugins.text.label_names import written_label

SEPARATORS = (",", ";", "|")
"""Characters that other tools write between the classes of a row."""
FEWEST_ROWS = 2
"""Rows with a list of classes: a single one may be a mistake."""


@dataclass
class LabelLists:
    """Labels that are probably lists of classes.

    Attributes:
        labels: These labels, in alphabetical order.
        rows: The number of their rows.
        parts: The parts of the first one.
    """

    labels: list[str]
    rows: int
    parts: list[str]

    def describe(self) -> str:
        """A sentence about them, and the forms of a file that has several classes a row."""
        label = written_label(self.labels[0])
        parts = " and ".join(map(written_label, self.parts[:2]))
        written = ", ".join(f'"{part}"' for part in self.parts[:2])
        columns = ",".join(self.parts[:2])
        return (
            f"{self.rows} rows have labels such as {label}, whose parts {parts} are labels of other rows, too. Each of "
            f"these labels is one class of its own. For several classes a row, write lists to a .jsonl file, such as "
            f"[{written}], and give data.label_type=classes. Or write a column of 0 and 1 for each class, and give "
            f"data.label=[{columns}]."
        )


def find_label_lists(rows: Mapping[str, int]) -> LabelLists | None:
    """The labels that are probably lists of classes; None: the labels do not look so.

    Each part of a list recurs in another label, and a part is a label of its own, or changes its place: ``a,b`` beside
    ``a`` and ``b``, or ``a,b``, ``b,c`` and ``a,c``. In ``Paris, France``, ``Paris, Texas`` and ``Austin, Texas``, the
    parts recur at one place alone: these are names with a comma.

    Args:
        rows: Label -> its number of rows.
    """
    for separator in SEPARATORS:
        lists = _lists_with(separator, rows)
        if lists is not None:
            return lists
    return None


def _lists_with(separator: str, rows: Mapping[str, int]) -> LabelLists | None:
    parts_of_label: dict[str, list[str]] = {}
    for label in rows:
        parts_of_label[label] = _split(label, separator)
    labels_of_part: dict[str, set[str]] = {}
    places_of_part: dict[str, set[tuple[int, bool]]] = {}
    for label, parts in parts_of_label.items():
        is_alone = len(parts) == 1
        for place, part in enumerate(parts):
            labels_of_part.setdefault(part, set()).add(label)
            places_of_part.setdefault(part, set()).add((place, is_alone))
    several = [label for label, parts in parts_of_label.items() if len(parts) > 1]
    lists = []
    for label in several:
        parts = parts_of_label[label]
        recurs = all(len(labels_of_part[part]) > 1 for part in parts)
        moves = any(len(places_of_part[part]) > 1 for part in parts)
        if recurs and moves:
            lists.append(label)
    count = sum(rows[label] for label in lists)
    if count < FEWEST_ROWS or len(lists) * 2 < len(several):
        return None
    lists.sort()
    return LabelLists(lists, count, parts_of_label[lists[0]])


def _split(label: str, separator: str) -> list[str]:
    """The parts of a label, without spaces around them, and without the brackets and quotes of a written list.

    A label with an empty part or a repeated one is no list: it is returned whole.
    """
    text = label.strip()
    is_written_list = text[:1] + text[-1:] in ("[]", "()", "{}")
    if is_written_list:
        text = text[1:-1]
    parts = [part.strip() for part in text.split(separator)]
    if is_written_list:
        parts = [part.strip("'\"") for part in parts]
    if "" in parts or len(set(parts)) < len(parts):
        return [label]
    return parts
