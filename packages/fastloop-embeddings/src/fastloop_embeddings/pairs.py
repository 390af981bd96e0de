"""Pairs of texts as a cross-encoder reads them, and the documents that each query is paired with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from fastloop import RecipeError
from numpy.typing import NDArray

from fastloop_embeddings.task import key_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = (("one two", "three"), ("x " * 9, "y"), ("x", "y " * 9), ("x " * 9, "y " * 8), ("", "y"))
"""Pairs for which joined ids are compared with those of the tokenizer."""


class Joiner:
    """Joins the ids of two texts, each tokenized alone, to those of the pair.

    A pair has up to ``max_length`` tokens: the longer text is truncated first, by the strategy ``longest_first``. One
    token may differ if both texts had been cut to ``max_length`` alone: it is not known which was longer.

    Raises:
        RecipeError: The tokenizer does not only put special tokens around the texts, so their ids do not suffice.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, where: str) -> None:
        alone = tokenizer("x", return_special_tokens_mask=True)
        pair = tokenizer("x", "x", return_special_tokens_mask=True)
        text = np.flatnonzero(np.equal(alone["special_tokens_mask"], 0))  # positions of the tokens of "x"
        both = np.flatnonzero(np.equal(pair["special_tokens_mask"], 0))
        size = len(text)
        problem = f"{where}.tokenizer: it does not only put special tokens around the texts of a pair. Use another."
        if not size or len(both) != 2 * size:
            raise RecipeError(problem, code="invalid-row")
        self.left = tokenizer.truncation_side == "left"
        self.before = text[0]  # special tokens before a text alone, and after it
        self.after = len(alone["input_ids"]) - 1 - text[-1]
        self.columns = [name for name in ("input_ids", "token_type_ids") if name in pair]
        # [CLS] x [SEP] x [SEP] is divided into [CLS], x, [SEP], x and [SEP]
        rows = np.array([pair[name] for name in self.columns], np.int32)
        ends = (both[0], both[size - 1] + 1, both[size], both[-1] + 1)
        self.parts = np.split(rows, ends, axis=1)
        self.specials = rows.shape[1] - 2 * size
        self.max_length = self.specials + 8
        for first, second in PROBES:
            joined = self(self._tokenize(tokenizer, first), self._tokenize(tokenizer, second))
            of_tokenizer = tokenizer(first, second, truncation="longest_first", max_length=self.max_length)
            if any(of_tokenizer[name] != row.tolist() for name, row in joined.items()):
                raise RecipeError(problem, code="invalid-row")
        self.max_length = max_length

    @staticmethod
    def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> NDArray[np.int32]:
        return np.array(tokenizer(text)["input_ids"], np.int32)

    def __call__(self, first: Any, second: Any) -> dict[str, Any]:
        """``input_ids`` of a pair, int32, from the ids of its texts. If the tokenizer has them, ``token_type_ids``."""
        first = first[self.before : len(first) - self.after]
        second = second[self.before : len(second) - self.after]
        room = self.max_length - self.specials
        short = min(len(first), len(second), room // 2)
        long = min(max(len(first), len(second)), room - short)
        before, _, between, _, after = self.parts
        if len(first) <= len(second):
            parts = [before, self._part(1, first, short), between, self._part(3, second, long), after]
        else:
            parts = [before, self._part(1, first, long), between, self._part(3, second, short), after]
        return dict(zip(self.columns, np.concatenate(parts, axis=1), strict=True))

    def _part(self, position: int, text: Any, size: int) -> NDArray[np.int32]:
        """The columns of a text of ``size`` tokens: its ids, and maybe the type of each token.

        Args:
            position: The position of the text in ``parts``.
        """
        columns: NDArray[np.int32] = np.repeat(self.parts[position][:, :1], size, axis=1)
        columns[0] = text[len(text) - size :] if self.left else text[:size]
        return columns


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
        self.rows = rows
        self.names = names
        self.documents = documents
        self.most = max((len(numbers) for numbers in documents), default=0)
        self.lengths = np.array([rows.lengths[numbers // len(names)].sum() for numbers in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def fingerprint(self) -> str:
        """See ``fastloop.data.DatasetProtocol``."""
        documents = blake2b(np.concatenate(self.documents).tobytes(), digest_size=8)
        return f"{self.rows.fingerprint()}-{documents.hexdigest()}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        labels = np.full(self.most, np.nan, np.float32)
        for place, number in enumerate(self.documents[index]):
            row, column = divmod(int(number), len(self.names))
            texts = self.rows[row]
            if place == 0:
                sample["text"] = texts["text"]
            sample[f"document {place}"] = texts[self.names[column]]
            labels[place] = texts.get("label", place == 0)
        return {**sample, "label": labels}


def draw(rows: Any, names: Sequence[str], count: int, seed: int) -> Lists:
    """The first document of each row, ``count`` of other rows, all at the same distances, and its further ones.

    A document of another row that fits the query, too, is left out: any row gives it as the first document of this
    query, or it is the query's own text.
    """
    columns = len(names)
    total = len(rows) * columns
    # With 4 rows of 2 documents, the row 1 has the documents 2 and 3. With the distances 3 and 6, it gets the
    # documents 2, 5, 0 (8 after the last one) and 3.
    distances = random.Random(seed).sample(range(columns, total), min(count, total - columns))
    starts = np.arange(0, total, columns)[:, None]
    documents = (starts + np.array([0, *distances, *range(1, columns)])) % total
    is_false = find_false_negatives(rows, names, documents)
    is_false[:, 0] = False  # the documents of the row itself
    is_false[:, 1 + len(distances) :] = False
    if not is_false.any():
        return Lists(rows, names, documents)
    return Lists(rows, names, [row[~row_is_false] for row, row_is_false in zip(documents, is_false, strict=True)])


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
    queries = texts[:, :1]
    answers = texts[:, 1]  # the first document of each row
    drawn = texts[:, 1:].ravel()[documents]
    is_answer = np.isin(queries * size + drawn, queries[:, 0] * size + answers)
    is_right: NDArray[np.bool_] = is_answer | (drawn == queries)
    return is_right


def group(rows: Any) -> Lists:
    """All rows with the same first text as one sample, in the order of the first row of each."""
    groups: dict[bytes, list[int]] = {}
    for index in range(len(rows)):
        groups.setdefault(rows[index]["text"].tobytes(), []).append(index)
    return Lists(rows, ("other",), [np.array(members) for members in groups.values()])
