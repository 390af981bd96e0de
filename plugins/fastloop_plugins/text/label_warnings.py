"""Warnings about classes that are probably mistakes in the data: rare, alike, or named as a missing value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastloop_plugins.rows.table import same_name, visible_name
from fastloop_plugins.text.label_names import MISSING, SHOWN, written_label

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS_OF_A_RARE_CLASS = 5
"""Rows: a class with fewer training rows gets a warning."""


def warn_about_classes(ids: NDArray[np.int64], classes: Sequence[str]) -> list[str]:
    """Warnings about the classes of the training split, one line each.

    Args:
        ids: (rows,) the class of each row.
    """
    warnings = [_rare_classes(ids, classes), _alike_classes(classes), _missing_value(classes)]
    return [warning for warning in warnings if warning is not None]


def _rare_classes(ids: NDArray[np.int64], classes: Sequence[str]) -> str | None:
    counts = np.bincount(ids, minlength=len(classes))
    rare = [index for index in range(len(classes)) if counts[index] < ROWS_OF_A_RARE_CLASS]
    if not rare:
        return None
    rare.sort(key=lambda index: (counts[index], index))
    listed = ", ".join(f"{classes[index]!r:.40} has {counts[index]}" for index in rare[:SHOWN])
    if len(rare) > SHOWN:
        listed += f" and {len(rare) - SHOWN} more"
    return (
        f"classes with fewer than {ROWS_OF_A_RARE_CLASS} rows to train on: {listed}. If they are mistakes, correct "
        "them, or give data.label_map"
    )


def _alike_classes(classes: Sequence[str]) -> str | None:
    names_by_key: dict[str, list[str]] = {}
    for name in classes:
        names_by_key.setdefault(same_name(name), []).append(name)
    groups = [names for names in names_by_key.values() if len(names) > 1]
    if not groups:
        return None
    listed = " and the classes ".join(", ".join(map(written_label, names)) for names in groups)
    # one override for all groups: a second one would replace the first
    pairs = [f"{written_label(name)}: {written_label(common)}" for name, common in _common_names(groups).items()]
    return (
        f"the classes {listed} differ only by case, spaces or characters that cannot be seen. If they are equal: "
        f"data.label_map={{{', '.join(pairs)}}}"
    )


def _common_names(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """The name that each group of equal names shares, for the names that differ from it.

    It has no needless spaces, and no characters that cannot be seen: ``{"Good": "good", "good ": "good"}`` for
    ``[["Good", "good", "good "]]``.
    """
    renamed: dict[str, str] = {}
    for group in groups:
        tidy = [name for name in group if name == visible_name(name)]
        common = tidy[-1] if tidy else visible_name(group[-1])
        for name in group:
            if name != common:
                renamed[name] = common
    return renamed


def _missing_value(classes: Sequence[str]) -> str | None:
    for name in classes:
        if name.strip().lower() in MISSING:
            written = written_label(name)
            remedy = f"If it is one, leave out its rows: data.label_map={{{written}: null}}"
            return f"the class {written} has the name of a missing value. {remedy}"
    return None
