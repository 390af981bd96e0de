"""Rows that ``data.label_map`` leaves out: it maps labels such as - and -1 in GLUE to null: rows without one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastloop.errors import RecipeError
from fastloop_plugins.rows.table import Table
from fastloop_plugins.tasks._text_labels import is_label, plain

if TYPE_CHECKING:
    from fastloop_plugins.tasks._text_data import TextData


def drop_rows(parts: Mapping[str, list[Table]], data: TextData) -> dict[str, list[Table]]:
    """The parts of each split without the rows that ``data.label_map`` leaves out. Adds their numbers to
    ``data.messages``.

    Raises:
        RecipeError: A label to leave out never occurs, or all rows of a split have one.
    """
    unwanted = {str(plain(label)) for label, name in (data.options.label_map or {}).items() if name is None}
    found = {role: list(those) for role, those in parts.items()}
    if not unwanted:
        return found
    total: Counter[str] = Counter()
    for role, those in found.items():
        counts: Counter[str] = Counter()
        rows = 0
        for index, part in enumerate(those):
            labels = part.column("label", data.labels[0])
            names = [str(plain(label)) if is_label(label) else "" for label in labels]
            counts.update(name for name in names if name in unwanted)
            kept = [row for row, name in enumerate(names) if name not in unwanted]
            columns = {column: part.column(key, column) for column, key in data.text_columns().items()} | {
                data.labels[0]: labels
            }
            those[index] = part.keep(columns, kept)
            rows += len(names)
        if rows and counts.total() == rows:
            raise RecipeError(
                f"{data.where}.label_map: leaves out all {rows} rows of the {role} split. "
                + (
                    "Remove these labels from it."
                    if role == "train"
                    else f"To leave out the split: data.splits.{role}=null."
                )
            )
        if counts:
            listed = ", ".join(f"{name!r} {count}" for name, count in sorted(counts.items()))
            line = (
                f"data: {role}: {counts.total()} of {rows} rows are left out by their label (data.label_map): {listed}"
            )
            data.messages.append((logging.INFO, line))
        total += counts
    if data.inference is None and (unknown := unwanted - total.keys()):
        raise RecipeError(f"{data.where}.label_map: the label {min(unknown)!r} never occurs.")
    return found
