"""An independent count of entities: every span of a sentence is compared with the definition of an entity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

SPANS = {
    "IOB1": "[IB]I*",
    "IOB2": "BI*",
    "IOE1": "I+E?|E",
    "IOE2": "I*E",
    "IOBES": "BI*E|S",
    "BILOU": "BI*L|U",
    None: "[BI]I*E?|E|S",
}
"""Scheme -> letters of the tags of an entity, which all have one type."""


def spans(tags: Sequence[str], scheme: str | None) -> list[tuple[str, int, int]]:
    """The entities of a sentence: type, first and last word."""
    letters = [tag[0] for tag in tags]
    types = [tag[2:] or "_" for tag in tags]

    def has(place: int, chosen: str, same: str | None = None, other: str | None = None) -> bool:
        """Whether the tag at a place has one of these letters, and the type ``same``, or another than ``other``."""
        if not 0 <= place < len(tags):
            return "O" in chosen and same is None
        typed = letters[place] == "O" or ((same is None or types[place] == same) and types[place] != other)
        return letters[place] in chosen and typed and not (letters[place] == "O" and same is not None)

    def begins(first: int, kind: str) -> bool:
        before = first - 1
        if scheme == "IOB1" and letters[first] == "B":
            return has(before, "IB", same=kind)
        if scheme == "IOB1":  # after a B of the same type, only if that B begins no entity
            alone = has(before, "B", same=kind) and not begins(before, kind)
            return has(before, "OIB", other=kind) or alone
        if scheme == "IOE1":
            return (
                has(before, "E", same=kind)
                if letters[first] == "E"
                else has(before, "OE") or has(before, "I", other=kind)
            )
        if scheme == "IOE2":
            return not has(before, "I", same=kind)
        if scheme is None:
            return letters[first] in "BS" or not has(before, "BI", same=kind)
        return True

    def ends(last: int, kind: str) -> bool:
        after = last + 1
        if scheme == "IOB1":
            return not has(after, "I", same=kind) and not (letters[last] == "B" and has(after, "B", other=kind))
        if scheme == "IOB2":
            return not has(after, "I", same=kind)
        if scheme == "IOE1":
            return has(after, "IE", same=kind) if letters[last] == "E" else not has(after, "IE", same=kind)
        if scheme is None:
            return letters[last] in "ES" or not has(after, "IE", same=kind)
        return True

    return [
        (types[first], first, last)
        for first in range(len(tags))
        for last in range(first, len(tags))
        if len(set(types[first : last + 1])) == 1
        and re.fullmatch(SPANS[scheme], "".join(letters[first : last + 1]))
        and begins(first, types[first])
        and ends(last, types[first])
    ]


def count(
    actual: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]], scheme: str | None = None
) -> dict[str, tuple[int, int, int]]:
    """Type -> entities that are right, predicted and actual."""
    sets = [
        {(number, *span) for number, tags in enumerate(sentences) for span in spans(tags, scheme)}
        for sentences in (predicted, actual)
    ]
    right, found, wanted = (Counter(span[1] for span in part) for part in (sets[0] & sets[1], *sets))
    return {kind: (right[kind], found[kind], wanted[kind]) for kind in sorted(found | wanted)}


def scores(right: int, predicted: int, actual: int) -> dict[str, float]:
    """Precision, recall and F1; 0 where they are undefined."""
    precision = right / max(predicted, 1)
    recall = right / max(actual, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / ((precision + recall) or 1)}


def accuracy(actual: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> float:
    """The share of words with the right tag."""
    right = [one == other for both in zip(actual, predicted, strict=True) for one, other in zip(*both, strict=True)]
    return sum(right) / len(right)


def total(counts: dict[str, tuple[int, int, int]]) -> dict[str, float]:
    """The scores over all types."""
    return scores(*(sum(numbers[part] for numbers in counts.values()) for part in range(3)))
