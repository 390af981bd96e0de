"""Rows that are held out of train for validation, and rows that ``data.limit`` draws: of texts and of images."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from fastloop import RecipeError
from fastloop.splits import TRAIN, VALIDATION
from fastloop_plugins._mapped import flatnonzero, spans, zeros
from fastloop_plugins.rows.file import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.rows.options import Limit

DRAW = 0
"""Seed for the selection of samples by ``validation_fraction`` and ``limit``: the same for every ``train.seed``."""


class Divisible(Protocol):
    """A split that ``divide`` can divide."""

    def __len__(self) -> int: ...

    def keep(self, ids: NDArray[np.int64]) -> Self:
        """The rows with these ids."""
        ...


T = TypeVar("T", bound=Divisible)


def divide(
    splits: dict[str, T], fraction: float, classes: Sequence[Hashable] | NDArray[Any] | None, limit: Limit, where: str
) -> tuple[dict[str, T], str]:
    """Hold rows out of ``train`` for ``validation``, and then draw as many rows of each split as its limit allows.

    Args:
        fraction: Share of ``train`` to hold out; 0: the source has a validation split, or none is wanted.
        classes: The class of each row of ``train``; None: the rows have none.
        where: The ``data`` section, for messages.

    Returns:
        The splits, and a note about held-out rows for the log.
    """
    divided = dict(splits)
    note = ""
    if fraction and TRAIN in splits:
        train = splits[TRAIN]
        train_ids, validation_ids = hold_out(len(train), fraction, classes, where)
        divided[TRAIN] = train.keep(train_ids)
        divided[VALIDATION] = train.keep(validation_ids)
        share = f"{fraction:.0%} of train"
        if classes is not None:
            share += ", of each class,"
        note = f" (no validation split: {share} held out)"
    for role, count in vars(limit).items():
        if count is not None and role in divided and count < len(divided[role]):
            divided[role] = divided[role].keep(draw(len(divided[role]), count))
    return divided, note


def draw(total: int, count: int) -> NDArray[np.int64]:
    """The ids of ``count`` of ``total`` rows, sorted: those of ``random.Random(DRAW).sample(range(total), count)``."""
    chosen = zeros(total, np.bool_)
    if _draws_from_a_pool(total, count):
        for row in islice(_shuffled(total), count):
            chosen[row] = True
        return flatnonzero(chosen)
    below = random.Random(DRAW).randrange
    for _ in range(count):
        row = below(total)
        while chosen[row]:
            row = below(total)
        chosen[row] = True
    return flatnonzero(chosen)


def _draws_from_a_pool(total: int, count: int) -> bool:
    """Whether ``random.sample`` removes each number that it draws from a list of all. Else it draws again if it has
    drawn a number before."""
    set_size = 21
    if count > 5:
        set_size += 4 ** math.ceil(math.log(count * 3, 4))
    return total <= set_size


def _shuffled(total: int) -> Iterator[int]:
    """Yield ``random.Random(DRAW).sample(range(total), total)`` one by one."""
    pool = zeros(total, np.int64)
    for span in spans(total):
        pool[span] = np.arange(span.start, span.stop)
    below = random.Random(DRAW).randrange
    for left in range(total, 0, -1):
        # pool[:left] holds the numbers that are not drawn yet; the last of them replaces the drawn one
        chosen = below(left)
        yield int(pool[chosen])
        pool[chosen] = pool[left - 1]


def hold_out(
    total: int, fraction: float, classes: Sequence[Hashable] | NDArray[Any] | None, where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
    count = max(round(total * fraction), 1)
    held_out = zeros(total, np.bool_)
    if classes is None:
        for row in islice(_shuffled(total), min(count, total - 1)):
            held_out[row] = True
    else:
        class_of = np.asarray(classes)
        counts = Counter(chain.from_iterable(class_of[row : row + BLOCK].tolist() for row in range(0, total, BLOCK)))
        left = _share(counts, fraction, count)
        missing = sum(left.values())
        order = _shuffled(total)
        while missing:
            row = next(order)
            if left[class_of[row]]:
                left[class_of[row]] -= 1
                missing -= 1
                held_out[row] = True
    if not held_out.any():
        rows = f"{total} rows with a class each" if total > 1 else "1 row"
        raise RecipeError(
            f"{rows} cannot be split into train and validation.",
            code="too-few-rows",
            place=f"{where}.validation_fraction",
            remedy="Give a validation split, or data.validation_fraction=0.",
        )
    return flatnonzero(~held_out), flatnonzero(held_out)


def hold_out_ends(texts: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """The start and the end of each text: a share of its characters, in the end, is held out for validation."""
    starts = []
    ends = []
    for text in texts:
        border = len(text) - max(round(len(text) * fraction), 1)
        starts.append(text[:border])
        ends.append(text[border:])
    return starts, ends


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
