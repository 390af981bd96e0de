"""Warnings about classes that are probably mistakes: rare, alike, lists, or named as a missing value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastloop_plugins.rows.table import same_name, visible_name
from fastloop_plugins.text.label_lists import find_label_lists
from fastloop_plugins.text.label_names import MISSING, SHOWN, Label, written_label

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS_OF_A_RARE_CLASS = 5
"""Rows: a class with fewer training rows gets a warning."""


def warn_about_classes(ids: NDArray[np.int64], classes: Sequence[str]) -> list[str]:
    """Warnings about the classes of the training split, one line each.

    Args:
        ids: (rows,) the class of each row.
    """
    counts = np.bincount(ids, minlength=len(classes))
    groups = alike_classes(classes)
    rows = dict(zip(classes, counts.tolist(), strict=True))
    renamed = _common_names(groups, rows)
    lists = find_label_lists(rows)
    warnings = [_rare_classes(counts, classes), _alike_warning(groups, renamed), _missing_value(classes, renamed)]
    if lists is not None:
        warnings.append(lists.describe())
    return [warning for warning in warnings if warning is not None]


def _rare_classes(counts: NDArray[np.int64], classes: Sequence[str]) -> str | None:
    """A warning about classes with few rows.

    Args:
        counts: (classes,) the rows of each class.
    """
    rare = [index for index in range(len(classes)) if counts[index] < ROWS_OF_A_RARE_CLASS]
    if not rare:
        return None
    rare.sort(key=lambda index: (counts[index], index))
    listed = ", ".join(f"{classes[index]!r:.40} has {counts[index]}" for index in rare[:SHOWN])
    if len(rare) > SHOWN:
        listed += f" and {len(rare) - SHOWN} more"
    return (
        f"classes with fewer than {ROWS_OF_A_RARE_CLASS} rows: {listed}. If they are mistakes, correct them, or join "
        "them with other classes by data.label_map."
    )


def alike_classes(classes: Sequence[str]) -> list[list[str]]:
    """The groups of two or more classes that differ only by case, spaces or characters that cannot be seen."""
    names_by_key: dict[str, list[str]] = {}
    for name in classes:
        names_by_key.setdefault(same_name(name), []).append(name)
    return [names for names in names_by_key.values() if len(names) > 1]


def warn_about_alike_names(classes: Sequence[str]) -> list[str]:
    """A warning about classes that are probably one, if there are any, for labels that no option renames."""
    groups = alike_classes(classes)
    return [f"{describe_alike(groups)} If they are equal, write them one way."] if groups else []


def describe_alike(groups: Sequence[Sequence[str]]) -> str:
    """The sentence about the groups of ``alike_classes``, of which there is one at least."""
    listed = " and the classes ".join(", ".join(map(written_label, names)) for names in groups)
    return f"the classes {listed} differ only by case, spaces or characters that cannot be seen."


def find_alike(name: Label, classes: Iterable[Label]) -> Label | None:
    """The first class that differs from a name only by case, spaces or characters that cannot be seen; None: there is
    none."""
    for known in classes:
        if same_name(str(known)) == same_name(str(name)):
            return known
    return None


def _alike_warning(groups: Sequence[Sequence[str]], renamed: Mapping[str, str]) -> str | None:
    if not groups:
        return None
    return f"{describe_alike(groups)} If they are equal: {_override(renamed)}."


def _override(names: Mapping[str, str | None]) -> str:
    """One override for all labels, because a second one would replace the first: ``data.label_map={'Good': 'good'}``.

    Args:
        names: Label -> the name of its class; None: leave out its rows.
    """
    pairs = []
    for label, name in names.items():
        value = "null" if name is None else written_label(name)
        pairs.append(f"{written_label(label)}: {value}")
    return f"data.label_map={{{', '.join(pairs)}}}"


def _common_names(groups: Sequence[Sequence[str]], rows: Mapping[str, int]) -> dict[str, str]:
    """The name that each group of equal names shares, for the names that differ from it.

    It is the one with the most rows that has no needless spaces, and no characters that cannot be seen: ``{"Good":
    "good", "good ": "good"}`` for ``[["Good", "good", "good "]]``. Of equally many rows, it is the last one.

    Args:
        rows: The number of rows of each class.
    """
    renamed: dict[str, str] = {}
    for group in groups:
        tidy = [name for name in group if name == visible_name(name)]
        common = max(reversed(tidy), key=lambda name: rows[name]) if tidy else visible_name(group[-1])
        for name in group:
            if name != common:
                renamed[name] = common
    return renamed


def _missing_value(classes: Sequence[str], renamed: Mapping[str, str]) -> str | None:
    """A warning about classes with the name of a missing value.

    Args:
        renamed: The pairs of the override that another warning proposes.
    """
    missing = [name for name in classes if name.strip().lower() in MISSING]
    if not missing:
        return None
    left_out: dict[str, str | None] = dict.fromkeys(missing)
    listed = ", ".join(map(written_label, missing))
    if len(missing) == 1:
        text = f"the class {listed} has the name of a missing value. If it is one, leave out its rows: "
    else:
        text = f"the classes {listed} have the names of missing values. If they are, leave out their rows: "
    text += f"{_override(left_out)}."
    if renamed:
        text += f" Together with the names above: {_override({**renamed, **left_out})}."
    return text
