"""Rows that are left out: by their label (``data.label_map``: null), by ``data.drop`` and by ``data.deduplicate``.

``label_map`` maps labels such as - and -1 in GLUE to null: rows without one. Its key "" stands for rows whose label is
missing: null, NaN, or an empty text.

No row is left out here because it is long: tokens after ``data.max_length`` are cut. Where depends on the task:

text classification       # ``text.tokens``: the tokenizer cuts; ``SplitReader`` warns
causal-lm                 # ``text.chat.tokens``: ``SequencesWithTargets`` cuts, and drops rows without a loss
seq2seq                   # ``text.sequences``: ``ColumnSequences`` cuts inputs and targets
token-classification      # ``tasks.tags.batches``: ``cut_words``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem
from fastloop.errors import RecipeError
from fastloop.problem import agree, counted_of
from fastloop_plugins._mapped import GrowingArray, flatnonzero, spans, zeros
from fastloop_plugins.rows.column import in_blocks
from fastloop_plugins.rows.split_rows import hash_rows
from fastloop_plugins.rows.table import Table
from fastloop_plugins.rows.unreadable import UnreadableRows
from fastloop_plugins.text.label_column import is_label, is_unlabelled, map_key
from fastloop_plugins.text.label_names import MISSING
from fastloop_plugins.text.repeats import first_rows

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData


def drop_rows(parts: Mapping[str, list[Table]], data: TextData) -> dict[str, list[Table]]:
    """The parts of each split without the rows that ``data.label_map`` and ``data.drop`` leave out. Adds their numbers
    to ``data.messages``.

    Raises:
        RecipeError: A label to leave out never occurs, or all rows of a split are left out.
    """
    kept = {role: list(tables) for role, tables in parts.items()}
    _drop_by_label(kept, data)
    for role, tables in kept.items():
        if role == "train" and data.stream is not None:  # the reader has left them out
            _report_drops(role, data.stream.index.dropped, int(data.stream.index.rows.sum()), data)
        elif data.drop.conditions:
            kept[role] = _drop_by_condition(role, tables, data)
    return kept


def _drop_by_label(parts: dict[str, list[Table]], data: TextData) -> None:
    """Replace each table by one without the rows whose label ``data.label_map`` leaves out."""
    unwanted = {map_key(label) for label, name in (data.options.label_map or {}).items() if name is None}
    if not unwanted:
        return
    total: Counter[str] = Counter()
    for role, tables in parts.items():
        counts: Counter[str] = Counter()
        rows = 0
        for index, part in enumerate(tables):
            is_kept = zeros(len(part), np.bool_)
            for row, label in enumerate(part.column("label", data.labels[0])):
                known = is_unlabelled(label) or is_label(label)
                if known and map_key(label) in unwanted:
                    counts[map_key(label)] += 1
                else:
                    is_kept[row] = True
            tables[index] = part.keep(flatnonzero(is_kept))
            rows += len(part)
        if rows and counts.total() == rows:
            raise _all_dropped(role, "label_map", "Remove these labels from it.", rows, data)
        if counts and data.reports(role):
            listed = ", ".join(f"{name!r} {count}" for name, count in sorted(counts.items()))
            left_out = counted_of(counts.total(), rows, "rows")
            verb = agree(counts.total(), "is", "are")
            line = f"data: {role}: {left_out} {verb} left out by their label (data.label_map): {listed}"
            data.messages.append(line)
        total += counts
    unknown = unwanted - total.keys()
    if data.inference is None and unknown:
        name = min(unknown)
        remedy = "Correct it, or remove it from data.label_map."
        if name.strip().lower() in MISSING:
            remedy += " Rows without a label have the key ''."
        raise RecipeError(
            f"the label {name!r} never occurs.", code="unknown-label", place=f"{data.where}.label_map", remedy=remedy
        )


def _drop_by_condition(role: str, parts: list[Table], data: TextData) -> list[Table]:
    counts = [0] * len(data.drop.conditions)
    kept = list[Table]()
    for part in parts:
        columns = {name: part.column(key, name) for name, key in data.drop.columns().items()}
        is_kept = zeros(len(part), np.bool_)
        unreadable = UnreadableRows(part)
        bad = unreadable.add if data.skip_unreadable else None
        for row in data.drop.sort_out(part.where, columns, counts, bad):
            is_kept[row] = True
        data.add_unreadable(int(unreadable.is_unreadable.sum()), unreadable)
        kept.append(part.keep(flatnonzero(is_kept)))
    rows = sum(map(len, kept))
    if sum(counts) and not rows:
        raise _all_dropped(role, "drop", "Remove a condition.", sum(counts), data)
    _report_drops(role, counts, rows, data)
    return kept


def _report_drops(role: str, counts: Sequence[int], kept: int, data: TextData) -> None:
    """Add the rows that each condition of ``data.drop`` leaves out to ``data.messages``.

    A split without such rows is named only if it is the one to train on: there, the conditions may have a typing error.
    """
    if not counts or not data.reports(role):
        return
    is_trained = role == "train" and data.inference is None
    if not sum(counts) and not is_trained:
        return
    listed = ", ".join(f"{condition} {count}" for condition, count in zip(data.drop.conditions, counts, strict=True))
    left_out = counted_of(sum(counts), sum(counts) + kept, data.unit)
    verb = agree(sum(counts), "is", "are")
    line = f"data: {role}: {left_out} {verb} left out (data.drop): {listed}"
    data.messages.append(line)


def drop_repeats(parts: list[Table], data: TextData) -> list[Table]:
    """The parts of train without the rows whose texts an earlier one has. Adds their number to ``data.messages``."""
    texts = GrowingArray(np.uint64)
    labels = GrowingArray(np.uint64)
    classes = {map_key(label): name for label, name in (data.options.label_map or {}).items()}

    def named(label: Any) -> Any:
        """The class of a label: Ham and ham may be one."""
        if not is_label(label):
            return label
        return classes.get(map_key(label), label)

    for part in parts:
        names = dict(data.text_columns())
        for name in data.optional_text_columns():
            if name in part.columns:
                names[name] = data.text_key
        for _, block in in_blocks([part.column(key, name) for name, key in names.items()]):
            texts.extend(hash_rows((*names, *row) for row in zip(*block, strict=True))[:, 0])
        label_columns = [part.column(key, name) for name, key in data.label_columns().items()]
        if label_columns:
            for _, block in in_blocks(label_columns):
                labels.extend(hash_rows(tuple(map(named, row)) for row in zip(*block, strict=True))[:, 0])
    first = first_rows(texts.finish())
    marks = labels.finish()
    chosen = zeros(len(first), np.bool_)
    other_labels = 0  # repeats whose label is not that of the first row
    for span in spans(len(first)):
        chosen[span] = first[span] == np.arange(span.start, span.stop)
        if len(marks):
            other_labels += int((marks[span] != marks[first[span]]).sum())
    kept = []
    start = 0  # rows of the parts before
    for part in parts:
        kept.append(part.keep(flatnonzero(chosen[start : start + len(part)])))
        start += len(part)
    if not data.reports("train"):
        return kept
    before = len(first)
    after = int(chosen.sum())
    left_out = counted_of(before - after, before, data.unit)
    repeat = agree(before - after, "repeats", "repeat")
    are = agree(before - after, "is", "are")
    line = f"data: train: {left_out} {repeat} the texts of an earlier one and {are} left out (data.deduplicate)"
    if other_labels:
        data.messages.append(Problem(f"{line}; {other_labels} with another label.", code="repeated-rows"))
    else:
        data.messages.append(line)
    return kept


def _all_dropped(role: str, key: str, remedy: str, rows: int, data: TextData) -> RecipeError:
    if role != "train":
        remedy = f"To leave out the split: data.splits.{role}=null."
    return RecipeError(
        f"leaves out all {rows} rows of the {role} split.",
        code="empty-split",
        place=f"{data.where}.{key}",
        remedy=remedy,
    )
