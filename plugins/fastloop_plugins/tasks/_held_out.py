"""Which rows are held out of train for validation, where the data has no validation split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence

from fastloop import RecipeError

DRAW = 0
"""Seed for the selection of samples by ``validation_fraction`` and ``limit``: the same for every ``train.seed``."""


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
