"""Samples that repeat each other: within train, in train and another split, and with different labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem
from fastloop_plugins._mapped import GrowingArray, concatenate, spans, zeros
from fastloop_plugins.text.chat.rows import describe_chat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.rows.split_rows import Rows
    from fastloop_plugins.text.data import TextData

    Marks = NDArray[np.uint64]

SHOWN = 60
"""Characters of a text that a message shows."""


def repeated_rows(marks: Marks) -> NDArray[np.int64]:
    """The rows whose mark another row has, too."""
    ranked = zeros(len(marks), np.uint64)
    ranked[:] = marks
    ranked.sort()
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    if not twice.size:
        return np.empty(0, np.int64)
    rows = GrowingArray(np.int64)
    for span in spans(len(marks)):
        rows.extend(span.start + np.flatnonzero(contains(twice, marks[span])))
    return rows.finish()


def first_rows(marks: Marks) -> NDArray[np.int64]:
    """(rows,) the first row with the mark of each row."""
    first = zeros(len(marks), np.int64)
    for span in spans(len(marks)):
        first[span] = np.arange(span.start, span.stop)
    rows = repeated_rows(marks)
    first[rows] = rows[_first_equal(marks[rows])]
    return first


def _first_equal(marks: Marks) -> NDArray[np.int64]:
    """The place of the first mark that equals each mark: ``[0, 1, 0]`` for ``[7, 5, 7]``."""
    _, first, places = np.unique(marks, return_index=True, return_inverse=True)
    return first[places]


def contains(ranked: Marks, marks: Marks) -> NDArray[np.bool_]:
    """Whether each mark is among some, which are sorted."""
    found: NDArray[np.bool_] = ranked[np.searchsorted(ranked[:-1], marks)] == marks
    return found


@dataclass(frozen=True)
class ComparedSamples:
    """The samples of a split, to compare.

    Attributes:
        marks: (samples,) a hash of the part of each sample that is compared.
        labels: (samples, ...) the label of each; None: they have none.
    """

    marks: Marks
    labels: NDArray[Any] | None


@dataclass(frozen=True)
class Wording:
    """How messages name the samples.

    Attributes:
        samples: Several samples, such as ``images``.
        contents: The part of them that is compared, such as ``texts``.
        show: A sample of a split, by the name of the split and its number.
        name_label: The name of a label; None: equal samples may have different labels.
        remove: How to remove those that repeat an earlier one of train.
    """

    samples: str
    contents: str
    show: Callable[[str, int], str]
    name_label: Callable[[Any], str] | None
    remove: str


def find_repeats(splits: Mapping[str, Rows], data: TextData, held_out: bool) -> list[Problem]:
    """Compare the rows of ``train`` with each other and with those of the other splits. Returns warnings, at most two.

    Lines and paragraphs of a language model are parts of a text, and may repeat. In regression, equal texts may have
    different numbers.

    Args:
        held_out: Whether the rows of ``validation`` are held out of ``train``.
    """
    if data.options.label is None and list(data.text_columns().values()) == ["text"]:
        return []
    wording = Wording(
        samples="rows",
        contents="texts",
        show=lambda role, row: _show(splits[role].texts[row], data),
        name_label=None if data.label_type == "number" else lambda label: _name(label, data.classes),
        remove="Remove them with data.deduplicate=true unless they are intended",
    )
    samples = {role: ComparedSamples(rows.hashes[:, 0], rows.labels) for role, rows in splits.items()}
    return describe_repeats(samples, wording, held_out)


def describe_repeats(splits: Mapping[str, ComparedSamples], wording: Wording, held_out: bool = False) -> list[Problem]:
    """Compare the samples of ``train`` with each other and with those of the other splits.

    Args:
        held_out: Whether the samples of ``validation`` are held out of ``train``. Repeats that are removed before that
            are in neither.

    Returns:
        Warnings, at most two: of samples that repeat, and of equal samples with different labels.
    """
    roles = sorted(splits, key=lambda role: role != "train")
    marks = concatenate([splits[role].marks for role in roles])
    rows = repeated_rows(marks)
    if not rows.size:
        return []
    ends = np.cumsum([0, *(len(splits[role].marks) for role in roles)])
    marks, split = marks[rows], np.searchsorted(ends, rows, side="right") - 1
    labels = [splits[role].labels for role in roles]
    own = [those[rows[split == number] - ends[number]] for number, those in enumerate(labels) if those is not None]
    codes = np.unique(np.concatenate(own), axis=0, return_inverse=True)[1].ravel() if own else np.zeros(len(rows), int)
    pairs = marks + codes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # a hash of content and label
    is_first, is_new = (_first_equal(those) == np.arange(len(rows)) for those in (marks, pairs))
    in_train = contains(np.sort(marks[split == 0]), marks) if (split == 0).any() else np.zeros(len(rows), bool)
    repeated, shared = (split == 0) & ~is_new, (split > 0) & in_train
    others = in_train & is_new & ~is_first

    def place(index: int) -> tuple[str, int]:
        number = int(split[index])
        return roles[number], int(rows[index] - ends[number])

    def show(chosen: NDArray[np.bool_]) -> str:
        return wording.show(*place(int(chosen.argmax())))

    found = []
    problems = []
    if count := int(repeated.sum()):
        found.append(f"{count} of {len(splits['train'].marks)} {wording.samples} of train repeat an earlier one")
    for number, role in enumerate(roles):
        if count := int((shared & (split == number)).sum()):
            found.append(f"{count} of {len(splits[role].marks)} {wording.samples} of {role} are in train, too")
    if found:
        in_own_files = [number for number, role in enumerate(roles) if role != "validation" or not held_out]
        too_high = f"Metrics of {wording.samples} that the model trains on are too high"
        if not shared.any():
            remedy = wording.remove
        elif (shared & np.isin(split, in_own_files)).any():
            remedy = f"{too_high}: remove these {wording.samples} from one of the splits"
        else:
            remedy = f"{too_high}. {wording.remove}"
        text = f"{'; '.join(found)}, such as {show(shared if shared.any() else repeated)}."
        problems.append(Problem(text, code="repeated-rows", place="data", remedy=f"{remedy}."))
    if others.any() and wording.name_label is not None:
        count, same = len(np.unique(marks[others])), np.flatnonzero(is_new & (marks == marks[others.argmax()]))
        names = []
        for role, row in map(place, same.tolist()):
            own_labels = splits[role].labels
            assert own_labels is not None  # equal samples have different labels, so there are some
            names.append(wording.name_label(own_labels[row]))
        where = f"such as {show(others)}: {' and '.join(names)}"
        problems.append(
            Problem(
                f"{wording.contents} with more than one label: {count}, {where}.",
                code="several-labels",
                place="data",
                remedy=f"Correct or remove these {wording.samples}.",
            )
        )
    return problems


def _name(label: Any, classes: Sequence[str]) -> str:
    """The name of a class, or of each class that a row of 0.0 and 1.0 has."""
    ids = np.flatnonzero(label).tolist() if label.ndim else [int(label)]
    return ", ".join(repr(classes[index]) for index in ids) or "none"


def _show(text: Any, data: TextData) -> str:
    if data.tagged:
        text = text[0]
    parts = [text] if isinstance(text, str) else text
    joined = " ".join(parts) if data.tagged else " | ".join(map(describe_chat, parts))
    return repr(joined if len(joined) <= SHOWN else f"{joined[:SHOWN]}...")
