"""Rows that repeat each other: within train, in train and another split, and with different labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop_plugins.rows.splits import Rows
    from fastloop_plugins.text.data import TextData

SHOWN = 60
"""Characters of a text that a message shows."""


def find_repeats(splits: Mapping[str, Rows], data: TextData) -> list[str]:
    """Compare the rows of ``train`` with each other and with those of the other splits, in linear time. Returns
    warnings, at most two.

    Lines and paragraphs of a language model are parts of a text, and may repeat. In regression, equal texts may have
    different numbers.
    """
    if data.options.label is None and list(data.text_columns().values()) == ["text"]:
        return []
    first: dict[Any, Any] = {}  # text of train -> its label
    labels: dict[Any, dict[Any, None]] = {}  # text with several labels -> these
    repeated: list[Any] = []
    shared: list[Any] = []
    found, lines = [], []
    for text, label in _labelled(splits["train"]):
        if text not in first:
            first[text] = label
        elif label == first[text] or label in labels.get(text, ()):
            repeated.append(text)
        else:
            labels.setdefault(text, {first[text]: None})[label] = None
    if repeated:
        found.append(f"{len(repeated)} of {len(splits['train'])} rows of train repeat an earlier one")
    for role in (role for role in splits if role != "train"):
        before = len(shared)
        for text, label in _labelled(splits[role]):
            if text in first:
                shared.append(text)
                if label != first[text]:
                    labels.setdefault(text, {first[text]: None})[label] = None
        if len(shared) > before:
            found.append(f"{len(shared) - before} of {len(splits[role])} rows of {role} are in train, too")
    if found:
        remedy = "Metrics of rows that the model trains on are too high: remove these rows"
        remedy = remedy if shared else "Remove them with data.deduplicate=true unless they are intended"
        lines.append(f"data: {'; '.join(found)}, such as {_show((shared or repeated)[0], data)}. {remedy}")
    if labels and data.label_type != "number":
        text, several = next(iter(labels.items()))
        names = " and ".join(_name(label, data.classes) for label in several)
        where = f"such as {_show(text, data)}: {names}"
        lines.append(f"data: texts with more than one label: {len(labels)}, {where}. Correct or remove these rows")
    return lines


def _labelled(rows: Rows) -> Iterator[tuple[Any, Any]]:
    """Each text with its label, or None."""
    for index, text in enumerate(rows.texts):
        if isinstance(text, tuple) and isinstance(text[0], list):  # words and tags
            text = tuple(map(tuple, text))
        label = rows.labels[index] if rows.labels is not None else None
        yield text, tuple(label) if isinstance(label, list) else label


def _name(label: Any, classes: Sequence[str]) -> str:
    """The name of a class, or of each class that a row of 0.0 and 1.0 has."""
    ids = [index for index, present in enumerate(label) if present] if isinstance(label, tuple) else [label]
    return ", ".join(repr(classes[index]) for index in ids) or "none"


def _show(text: Any, data: TextData) -> str:
    if data.tagged:
        text = text[0]
    joined = text if isinstance(text, str) else (" " if data.tagged else " | ").join(text)
    return repr(joined if len(joined) <= SHOWN else f"{joined[:SHOWN]}...")
