"""Pairs of texts as a cross-encoder reads them, and the documents that each query is paired with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from fastloop import RecipeError
from numpy.typing import NDArray

from fastloop_embeddings.task import key_of

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
        alone, pair = (tokenizer(*texts, return_special_tokens_mask=True) for texts in (("x",), ("x", "x")))
        text, both = (np.flatnonzero(np.equal(each["special_tokens_mask"], 0)) for each in (alone, pair))
        size, self.left = len(text), tokenizer.truncation_side == "left"
        problem = f"{where}.tokenizer: it does not only put special tokens around the texts of a pair. Use another."
        if not size or len(both) != 2 * size:
            raise RecipeError(problem, code="invalid-row")
        self.around = text[0], len(alone["input_ids"]) - 1 - text[-1]  # special tokens before and after a text alone
        self.columns = [name for name in ("input_ids", "token_type_ids") if name in pair]
        rows = np.array([pair[name] for name in self.columns], np.int32)
        ends = (both[0], both[size - 1] + 1, both[size], both[-1] + 1)
        self.parts = np.split(rows, ends, axis=1)  # special tokens, and the texts between them
        self.specials = rows.shape[1] - 2 * size
        self.max_length = self.specials + 8
        for probe in PROBES:
            own = self(*(np.array(tokenizer(each)["input_ids"], np.int32) for each in probe))
            theirs = tokenizer(*probe, truncation="longest_first", max_length=self.max_length)
            if any(theirs[name] != row.tolist() for name, row in own.items()):
                raise RecipeError(problem, code="invalid-row")
        self.max_length = max_length

    def __call__(self, first: Any, second: Any) -> dict[str, Any]:
        """``input_ids`` of a pair, int32, from the ids of its texts. If the tokenizer has them, ``token_type_ids``."""
        before, after = self.around
        texts = [text[before : len(text) - after] for text in (first, second)]
        room, (short, long) = self.max_length - self.specials, sorted(map(len, texts))
        short = min(short, room // 2)
        long = min(long, room - short)
        sizes = (short, long) if len(texts[0]) <= len(texts[1]) else (long, short)
        parts = [*self.parts]
        for place, text, size in zip((1, 3), texts, sizes, strict=True):
            parts[place] = np.repeat(parts[place][:, :1], size, axis=1)  # the type of each token
            parts[place][0] = text[len(text) - size if self.left else 0 :][:size]
        return dict(zip(self.columns, np.concatenate(parts, axis=1), strict=True))


class Lists:
    """A map-style dataset of queries with several documents each, the same in every epoch.

    A sample has ``text``, the ids of the query, a key for each document with its ids, and ``label``, (most documents,)
    float32: the labels of the rows, or 1 for the first document and 0 for the others, filled with NaN.

    Args:
        rows: Map-style, with ``lengths``: a sample has the ids of each column, of which ``text`` is the query.
        names: The columns of documents.
        documents: Those of each sample: ``row * len(names) + column``. The first one has the query's row.
    """

    deterministic = True

    def __init__(self, rows: Any, names: Sequence[str], documents: Sequence[Any]) -> None:
        self.rows, self.names, self.documents = rows, names, documents
        self.most = max(map(len, documents), default=0)
        self.lengths = np.array([rows.lengths[each // len(names)].sum() for each in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def fingerprint(self) -> str:
        """See ``fastloop.data.DatasetProtocol``."""
        documents = blake2b(np.concatenate(self.documents).tobytes(), digest_size=8)
        return f"{self.rows.fingerprint()}-{documents.hexdigest()}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = [divmod(int(place), len(self.names)) for place in self.documents[index]]
        samples = [self.rows[row] for row, _ in found]
        texts = {f"document {place}": samples[place][self.names[name]] for place, (_, name) in enumerate(found)}
        labels = np.full(self.most, np.nan, np.float32)
        labels[: len(samples)] = [sample.get("label", place == 0) for place, sample in enumerate(samples)]
        return {"text": samples[0]["text"], **texts, "label": labels}


def draw(rows: Any, names: Sequence[str], count: int, seed: int) -> Lists:
    """The first document of each row, ``count`` of other rows, all at the same distances, and its further ones.

    A document of another row that fits the query, too, is left out: any row gives it as the first document of this
    query, or it is the query's own text.
    """
    columns, total = len(names), len(rows) * len(names)
    drawn = random.Random(seed).sample(range(columns, total), min(count, total - columns))
    starts = np.arange(0, total, columns)[:, None]
    documents = (starts + np.array([0, *drawn, *range(1, columns)])) % total
    false = find_false_negatives(rows, names, documents)
    false[:, [0, *range(1 + len(drawn), documents.shape[1])]] = False  # those of the row itself
    if not false.any():
        return Lists(rows, names, documents)
    return Lists(rows, names, [row[~is_false] for row, is_false in zip(documents, false, strict=True)])


def find_false_negatives(rows: Any, names: Sequence[str], documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which documents of each row fit its query, (rows, documents): see ``draw``.

    Args:
        documents: As in ``Lists``.
    """
    columns = ("text", *names)
    keys = np.empty((len(rows), len(columns)), np.int64)
    for index in range(len(rows)):
        sample = rows[index]
        keys[index] = [key_of(sample[name]) for name in columns]
    # each text gets a number, so that a query and a document are one number, too
    texts = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
    size = texts.max(initial=0) + 1
    queries, documents_of = texts[:, 0], texts[:, 1:].ravel()
    known = queries * size + texts[:, 1]
    found = documents_of[documents]
    return np.isin(queries[:, None] * size + found, known) | (found == queries[:, None])


def group(rows: Any) -> Lists:
    """All rows with the same first text as one sample, in the order of the first row of each."""
    groups: dict[bytes, list[int]] = {}
    for index in range(len(rows)):
        groups.setdefault(rows[index]["text"].tobytes(), []).append(index)
    return Lists(rows, ("other",), [np.array(each) for each in groups.values()])
