"""Samples that repeat each other: within train, in train and another split, and with different labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem
from fastloop.problem import agree, counted_of
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
    repeats_last = ranked[1:] == ranked[:-1]
    twice = ranked[1:][repeats_last]  # [3, 3, 3, 5, 8, 8] has the marks [3, 3, 8] twice
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
    # of [3, 5, 8], 5 for the marks 4 and 5, and 8 for those above 5
    nearest = ranked[np.searchsorted(ranked[:-1], marks)]
    is_there: NDArray[np.bool_] = nearest == marks
    return is_there


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


@dataclass(frozen=True)
class RepeatedSamples:
    """The samples of all splits whose content another one has, too, in the order of the splits.

    Attributes:
        roles: The names of the splits, ``train`` first.
        split: (samples,) int64, the number of the split of each sample: that of ``train`` is 0.
        number: (samples,) int64, the number of each sample in its split.
        marks: (samples,) a hash of the content of each.
        is_first: (samples,) whether it is the first with its content.
        is_new: (samples,) whether it is the first with its content and its label.
        in_train: (samples,) whether ``train`` has its content.
    """

    roles: Sequence[str]
    split: NDArray[np.int64]
    number: NDArray[np.int64]
    marks: Marks
    is_first: NDArray[np.bool_]
    is_new: NDArray[np.bool_]
    in_train: NDArray[np.bool_]

    def place(self, index: int) -> tuple[str, int]:
        """The split of a sample, and its number there."""
        return self.roles[int(self.split[index])], int(self.number[index])

    def first_place(self, chosen: NDArray[np.bool_]) -> tuple[str, int]:
        """``place`` of the first chosen sample."""
        return self.place(int(chosen.argmax()))


def compare_samples(splits: Mapping[str, ComparedSamples]) -> RepeatedSamples | None:
    """Find the samples whose content another one of any split has, too; None: there are none."""
    roles = sorted(splits, key=lambda role: role != "train")
    every_mark = concatenate([splits[role].marks for role in roles])
    rows = repeated_rows(every_mark)
    if not rows.size:
        return None
    marks = every_mark[rows]
    # with 3 samples of train and 2 of validation, ends are [0, 3, 5]: row 4 is number 1 of split 1
    ends = np.cumsum([0, *(len(splits[role].marks) for role in roles)])
    split = np.searchsorted(ends, rows, side="right") - 1
    number = rows - ends[split]
    labels: list[NDArray[Any]] = []
    for index, role in enumerate(roles):
        of_split = splits[role].labels
        if of_split is not None:
            labels.append(of_split[number[split == index]])
    pairs = marks  # hashes of content and label
    if labels:
        _, codes = np.unique(np.concatenate(labels), axis=0, return_inverse=True)
        pairs = marks + codes.ravel().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(len(rows))
    of_train = np.sort(marks[split == 0])
    return RepeatedSamples(
        roles=roles,
        split=split,
        number=number,
        marks=marks,
        is_first=_first_equal(marks) == places,
        is_new=_first_equal(pairs) == places,
        in_train=contains(of_train, marks) if len(of_train) else np.zeros(len(rows), bool),
    )


def describe_repeats(splits: Mapping[str, ComparedSamples], wording: Wording, held_out: bool = False) -> list[Problem]:
    """Compare the samples of ``train`` with each other and with those of the other splits.

    Args:
        held_out: Whether the samples of ``validation`` are held out of ``train``. Repeats that are removed before that
            are in neither.

    Returns:
        Warnings, at most two: of samples that repeat, and of equal samples with different labels.
    """
    repeats = compare_samples(splits)
    if repeats is None:
        return []
    problems = _describe_equal(repeats, splits, wording, held_out)
    if wording.name_label is not None:
        problems += _describe_labels(repeats, splits, wording, wording.name_label)
    return problems


def _describe_equal(
    repeats: RepeatedSamples, splits: Mapping[str, ComparedSamples], wording: Wording, held_out: bool
) -> list[Problem]:
    """A warning of samples of train that repeat, and of other splits that train has; empty: there are none."""
    repeated = (repeats.split == 0) & ~repeats.is_new
    shared = (repeats.split > 0) & repeats.in_train
    counts = []
    count = int(repeated.sum())
    if count:
        verb = agree(count, "repeats", "repeat")
        samples = counted_of(count, len(splits["train"].marks), wording.samples)
        counts.append(f"{samples} of train {verb} an earlier one")
    for number, role in enumerate(repeats.roles):
        count = int((shared & (repeats.split == number)).sum())
        if count:
            verb = agree(count, "is", "are")
            samples = counted_of(count, len(splits[role].marks), wording.samples)
            counts.append(f"{samples} of {role} {verb} in train, too")
    if not counts:
        return []
    in_own_files = []
    for number, role in enumerate(repeats.roles):
        if role != "validation" or not held_out:
            in_own_files.append(number)
    too_high = f"Metrics of {wording.samples} that the model trains on are too high"
    if not shared.any():
        remedy = wording.remove
    elif (shared & np.isin(repeats.split, in_own_files)).any():
        remedy = f"{too_high}: remove these {wording.samples} from one of the splits"
    else:
        remedy = f"{too_high}. {wording.remove}"
    example = wording.show(*repeats.first_place(shared if shared.any() else repeated))
    text = f"{'; '.join(counts)}, such as {example}."
    return [Problem(text, code="repeated-rows", place="data", remedy=f"{remedy}.")]


def _describe_labels(
    repeats: RepeatedSamples,
    splits: Mapping[str, ComparedSamples],
    wording: Wording,
    name_label: Callable[[Any], str],
) -> list[Problem]:
    """A warning of samples that have another label than an equal one of train; empty: there are none."""
    has_other_label = repeats.in_train & repeats.is_new & ~repeats.is_first
    if not has_other_label.any():
        return []
    count = len(np.unique(repeats.marks[has_other_label]))
    example = int(has_other_label.argmax())
    equal = np.flatnonzero(repeats.is_new & (repeats.marks == repeats.marks[example]))  # one for each label
    names = []
    for index in equal.tolist():
        role, number = repeats.place(index)
        labels = splits[role].labels
        assert labels is not None  # equal samples have different labels, so there are some
        names.append(name_label(labels[number]))
    shown = wording.show(*repeats.place(example))
    return [
        Problem(
            f"{wording.contents} with more than one label: {count}, such as {shown}: {' and '.join(names)}.",
            code="several-labels",
            place="data",
            remedy=f"Correct or remove these {wording.samples}.",
        )
    ]


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
