"""Names of classes: those that stand for a missing value, and how recipes, messages and files have them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastloop.errors import RecipeError
from fastloop_plugins.rows.table import problem_of_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

Label = int | str
SHOWN = 8
"""Labels that a message lists."""
MISSING = {
    *("", "-", "?", ".", "na", "n/a", "<na>", "nan", "-nan", "nat", "none", "null", "nil", "\\n", "missing"),
    *("#n/a", "#n/a n/a", "#na", "#div/0!", "#name?", "#null!", "#num!", "#ref!", "#value!", "1.#ind", "1.#qnan"),
}
"""Missing values as other tools write them, in lower case: pandas, Excel, SQL, Weka and SAS."""


def refuse_broken_names(names: Iterable[str], where: str) -> None:
    """Raise an error for a name of a class or tag that is no text: the files of an exported model could not hold it."""
    for name in names:
        problem = problem_of_text(name)
        if problem is not None:
            raise RecipeError(f"the name {name!r} {problem}", code="wrong-label", place=where)


def has_unnamed_classes(classes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the classes of a model are numbers, and those of its data have names: the run that trained it read a file
    without them."""
    return all(name.isdecimal() for name in classes) and set(names).isdisjoint(classes)


def written_label(label: Label) -> str:
    """A label as YAML, for a proposed ``data.label_map``: with escapes for characters that cannot be seen, or that
    look like others."""
    if isinstance(label, int):
        return str(label)
    is_plain = unicodedata.is_normalized("NFC", label)
    if is_plain and "\\" not in repr(label):
        return repr(label)
    escaped = ""
    for character in label:
        is_shown = character.isprintable() and (is_plain or character.isascii())
        if character in '"\\':
            escaped += f"\\{character}"
        elif is_shown:
            escaped += character
        else:
            escaped += f"\\U{ord(character):08x}" if ord(character) > 0xFFFF else f"\\u{ord(character):04x}"
    return f'"{escaped}"'


def list_labels(labels: Iterable[Label]) -> str:
    """Labels for a message, numbers first; only the first ones if there are many."""
    ordered = sorted(labels, key=lambda label: (isinstance(label, str), label))
    listed = ", ".join(f"{label!r:.60}" for label in ordered[:SHOWN])
    if len(ordered) > SHOWN:
        listed += f" and {len(ordered) - SHOWN} more"
    return listed


def count_classes(ids: Sequence[int] | NDArray[np.int64], classes: Sequence[str]) -> str:
    """``describe_counts`` of the rows of each class."""
    return describe_counts(np.bincount(np.asarray(ids, np.int64), minlength=len(classes)), classes)


def describe_counts(counts: NDArray[np.int64], classes: Sequence[str]) -> str:
    """The number of rows of each class, the largest class first: ``neg 36, pos 36, label 1``.

    If there are many, it names the largest ones and the smallest one: ``..., 12 more, and label 1``.
    """
    order = sorted(range(len(classes)), key=lambda index: (-counts[index], index))
    described: list[str] = []
    for index in order:
        name = classes[index]
        written = name if name.isidentifier() else repr(name)
        described.append(f"{written:.40} {counts[index]}")
    if len(described) > SHOWN:
        described = [*described[: SHOWN - 1], f"{len(described) - SHOWN} more", f"and {described[-1]}"]
    return ", ".join(described)
