"""The splits of texts and of images: their names, the rows held out of train for validation, and their limits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self, TypeVar

from fastloop import RecipeError, option

DRAW = 0
"""Seed for the selection of samples by ``validation_fraction`` and ``limit``: the same for every ``train.seed``."""


@dataclass(kw_only=True)
class Splits:
    """``data.splits``."""

    train: Annotated[str, option("the source's name of the split to train on")] = "train"
    validation: Annotated[str | None, option("the source's name of the split to evaluate on")] = "validation"
    test: Annotated[str | None, option("the source's name of the split to test on")] = "test"


@dataclass(kw_only=True)
class Limit:
    """``data.limit``."""

    train: Annotated[int | None, option("samples", ge=1)] = None
    validation: Annotated[int | None, option("samples", ge=1)] = None
    test: Annotated[int | None, option("samples", ge=1)] = None


@dataclass
class Rows:
    """The rows of one split, by column.

    Attributes:
        columns: Name -> values.
        labels: The label of each row, if the task has labels: 0..n-1, or as ``text.targets`` reads them.
        sources: The number of each row's source, with ``data.sources``.
    """

    columns: dict[str, list[Any]]
    labels: list[Any] | None = None
    sources: list[int] | None = None

    @property
    def texts(self) -> list[Any]:
        """Each row: the value of the only column, or a tuple of the values of several."""
        columns = list(self.columns.values())
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def keep(self, ids: Sequence[int]) -> Rows:
        """The rows with these ids."""
        columns = {name: [values[index] for index in ids] for name, values in self.columns.items()}
        labels, sources = (
            None if values is None else [values[index] for index in ids] for values in (self.labels, self.sources)
        )
        return Rows(columns, labels, sources)


def join_rows(parts: Sequence[dict[str, list[Any]]]) -> Rows:
    """The rows of several tables with the same columns."""
    if len(parts) == 1:
        return Rows(parts[0])
    return Rows({name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else {})


class Divisible(Protocol):
    """A split that ``divide`` can divide."""

    def __len__(self) -> int: ...

    def keep(self, ids: Sequence[int]) -> Self:
        """The rows with these ids."""
        ...


T = TypeVar("T", bound=Divisible)


def divide(
    splits: dict[str, T], fraction: float, classes: Sequence[Hashable] | None, limit: Limit, where: str
) -> tuple[dict[str, T], str]:
    """Hold rows out of ``train`` for ``validation``, and then draw as many rows of each split as its limit allows.

    Args:
        fraction: Share of ``train`` to hold out; 0: the source has a validation split, or none is wanted.
        classes: The class of each row of ``train``; None: the rows have none.
        where: The ``data`` section, for messages.

    Returns:
        The splits, and a note about held-out rows for the log.
    """
    found, note = dict(splits), ""
    if fraction and "train" in found:
        train, held = hold_out(len(found["train"]), fraction, classes, where)
        found |= {"train": found["train"].keep(train), "validation": found["train"].keep(held)}
        share = f"{fraction:.0%} of train" + (", of each class," if classes is not None else "")
        note = f" (no validation split: {share} held out)"
    for role, count in vars(limit).items():
        if count is not None and role in found and count < len(found[role]):
            found[role] = found[role].keep(draw(len(found[role]), count))
    return found, note


def draw(total: int, count: int) -> list[int]:
    """The ids of ``count`` of ``total`` rows, sorted."""
    return sorted(random.Random(DRAW).sample(range(total), count))


def hold_out(
    total: int, fraction: float, classes: Sequence[Hashable] | None, where: str
) -> tuple[list[int], list[int]]:
    """Draw rows for validation. Returns the ids of the rows of train and of validation, both sorted.

    Each class has the same share in both, as far as its rows allow: a class with two rows or more has one in validation
    at least, and a class with one row stays in train. The result does not depend on the numbers of the classes: an
    evaluation may number them otherwise.

    Args:
        total: Number of rows.
        fraction: Share of the rows to hold out.
        classes: The class of each row; None: the rows have none.
        where: The ``data`` section, for messages.

    Raises:
        RecipeError: No row can be held out.
    """
    order = random.Random(DRAW).sample(range(total), total)
    count = max(round(total * fraction), 1)
    if classes is None:
        held = set(order[: min(count, total - 1)])
    else:
        left, held = _share(Counter(classes), fraction, count), set()
        for index in order:
            if left[classes[index]]:
                left[classes[index]] -= 1
                held.add(index)
    if not held:
        rows = f"{total} rows with a class each" if total > 1 else f"{total} row"
        raise RecipeError(
            f"{where}.validation_fraction: {rows} cannot be split into train and validation. Give a validation split, "
            "or data.validation_fraction=0."
        )
    return [index for index in range(total) if index not in held], sorted(held)


def hold_out_ends(texts: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """The start and the end of each text: a share of its characters, in the end, is held out for validation."""
    ends = [len(text) - max(round(len(text) * fraction), 1) for text in texts]
    pairs = list(zip(texts, ends, strict=True))
    return [text[:end] for text, end in pairs], [text[end:] for text, end in pairs]


def _share(counts: Counter[Hashable], fraction: float, count: int) -> dict[Hashable, int]:
    """The rows of each class to hold out: about ``count`` in total, by largest remainders."""
    shares = {name: min(max(int(size * fraction), 1), size - 1) for name, size in counts.items()}
    missing = count - sum(shares.values())
    # stable: ties by the first row of a class
    for name in sorted(counts, key=lambda name: shares[name] - counts[name] * fraction):
        if missing > 0 and 0 < shares[name] < counts[name] - 1:
            shares[name] += 1
            missing -= 1
    return shares
