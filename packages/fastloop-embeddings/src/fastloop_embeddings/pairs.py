"""Pairs of texts as a cross-encoder reads them, and the documents that each query is paired with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from fastloop import RecipeError

PROBES = (("one two", "three"), ("x " * 9, "y"), ("x", "y " * 9), ("x " * 9, "y " * 8), ("", "y"))
"""Pairs for which joined ids are compared with those of the tokenizer."""


class Joiner:
    """Joins the ids of two texts, each tokenized alone, to those of the pair.

    A pair has up to ``max_length`` tokens: the longer text is truncated first, by the strategy ``longest_first``. One
    token may differ if both texts had been cut to ``max_length`` alone: it is not known which was longer.

    Raises:
        RecipeError: The tokenizer does not only put special tokens around the texts, so their ids do not suffice.
    """

    def __init__(self, tokenizer: Any, max_length: int, where: str) -> None:
        text, alone = (tokenizer("x", add_special_tokens=special)["input_ids"] for special in (False, True))
        pair, size, self.left = tokenizer("x", "x"), len(text), tokenizer.truncation_side == "left"
        start, found, self.typed = places(text, alone), places(text, pair["input_ids"]), "token_type_ids" in pair
        problem = f"{where}.tokenizer: it does not only put special tokens around the texts of a pair. Use another."
        if len(start) != 1 or len(found) != 2:
            raise RecipeError(problem)
        self.around = start[0], len(alone) - start[0] - size  # special tokens before and after a text alone
        types = pair["token_type_ids"] if self.typed else [0] * len(pair["input_ids"])
        parts = slice(found[0]), slice(found[0] + size, found[1]), slice(found[1] + size, None)
        self.ids, self.types = ([np.array(row[part], np.int32) for part in parts] for row in (pair["input_ids"], types))
        self.kinds, self.specials = [types[place] for place in found], sum(map(len, self.ids))
        self.max_length = self.specials + 8
        for probe in PROBES:
            own = self(*(np.array(tokenizer(each)["input_ids"], np.int32) for each in probe))
            theirs = tokenizer(*probe, truncation="longest_first", max_length=self.max_length)
            names = ("input_ids", "token_type_ids")[: 1 + self.typed]
            if [theirs[name] for name in names] != [each.tolist() for each in own[: len(names)]]:
                raise RecipeError(problem)
        self.max_length = max_length

    def __call__(self, first: Any, second: Any) -> tuple[Any, Any]:
        """Ids and types of the tokens of a pair, int32, from the ids of its texts."""
        before, after = self.around
        texts = [text[before : len(text) - after] for text in (first, second)]
        room, (short, long) = self.max_length - self.specials, sorted(map(len, texts))
        long = min(long, max(short, room - short))
        if short + long > room:
            short, long = room // 2, room - room // 2
        sizes = (short, long) if len(texts[0]) <= len(texts[1]) else (long, short)
        one, other = (
            text[len(text) - size if self.left else 0 :][:size] for text, size in zip(texts, sizes, strict=True)
        )
        types = [np.full(len(text), kind, np.int32) for text, kind in zip((one, other), self.kinds, strict=True)]
        return (
            np.concatenate([self.ids[0], one, self.ids[1], other, self.ids[2]]),
            np.concatenate([self.types[0], types[0], self.types[1], types[1], self.types[2]]),
        )


def places(part: list[int], ids: list[int]) -> list[int]:
    """The places in ``ids`` where ``part`` begins."""
    size = len(part)
    return [place for place in range(len(ids) - size + 1) if size and ids[place : place + size] == part]


class Lists:
    """A map-style dataset of queries with several documents each, the same in every epoch.

    A sample has ``text``, the ids of the query, a key for each document with its ids, and ``label``, (documents,)
    float32: the labels of the rows, or 1 for the first document and 0 for the others.

    Args:
        rows: Map-style, with ``lengths``: a sample has the ids of each column, of which ``text`` is the query.
        names: The columns of documents.
        documents: Those of each sample: ``row * len(names) + column``. The first one has the query's row.
    """

    deterministic = True

    def __init__(self, rows: Any, names: Sequence[str], documents: Sequence[Any]) -> None:
        self.rows, self.names, self.documents = rows, names, documents
        self.lengths = np.array([rows.lengths[each // len(names)].sum() for each in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def fingerprint(self) -> str:
        """See ``fastloop.data.DatasetProtocol``."""
        return (
            f"{self.rows.fingerprint()}-{blake2b(np.concatenate(self.documents).tobytes(), digest_size=8).hexdigest()}"
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = [divmod(int(place), len(self.names)) for place in self.documents[index]]
        samples = [self.rows[row] for row, _ in found]
        texts = {f"document {place}": samples[place][self.names[name]] for place, (_, name) in enumerate(found)}
        labels = [sample.get("label", float(place == 0)) for place, sample in enumerate(samples)]
        return {"text": samples[0]["text"], **texts, "label": np.array(labels, np.float32)}


def draw(rows: Any, names: Sequence[str], count: int, seed: int) -> Lists:
    """The first document of each row, ``count`` of other rows, all at the same distances, and its further ones."""
    columns, total = len(names), len(rows) * len(names)
    drawn = random.Random(seed).sample(range(columns, total), min(count, total - columns))
    starts = np.arange(0, total, columns)[:, None]
    return Lists(rows, names, (starts + np.array([0, *drawn, *range(1, columns)])) % total)


def group(rows: Any) -> Lists:
    """All rows with the same first text as one sample, in the order of the first row of each."""
    groups: dict[bytes, list[int]] = {}
    for index in range(len(rows)):
        groups.setdefault(rows[index]["text"].tobytes(), []).append(index)
    return Lists(rows, ("other",), [np.array(each) for each in groups.values()])
