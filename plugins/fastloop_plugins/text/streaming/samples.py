"""Turn streamed rows into samples, in the data workers.

Each class is an ``Encoder`` of ``text.streaming.dataset``: rows and their names -> samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import DataError
from fastloop_plugins._cache import flat
from fastloop_plugins.rows.index import Row
from fastloop_plugins.rows.table import show
from fastloop_plugins.text.batches import Sequences
from fastloop_plugins.text.chat.tokens import RowEncoder
from fastloop_plugins.text.columns import join_columns, token_types
from fastloop_plugins.text.lm_batches import MaskedSequences
from fastloop_plugins.text.targets import read_number
from fastloop_plugins.text.tokenizers import end_of
from fastloop_plugins.text.tokens import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.chat.data import LanguageTextData
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel

logger = logging.getLogger("fastloop")

PROBED = 256
"""Rows to tokenize in full, to estimate how many are longer than a sample."""


class LabelReader:
    """Reads the labels of streamed rows.

    Args:
        table: Label in the files -> class of a sample.
    """

    def __init__(self, data: TextData, table: Mapping[Any, Any]) -> None:
        self.column, self.table, self.numbers = data.labels[0], table, data.label_type == "number"
        self.untyped = data.stream is not None and data.stream.head.untyped

    def read(self, rows: list[Row], names: list[str]) -> NDArray[Any]:
        """The labels of rows: classes int64, or numbers float32.

        Raises:
            DataError: A label is no number, or was not there when the run started.
        """
        labels = [self._label(row[-1], name) for row, name in zip(rows, names, strict=True)]
        return np.array(labels, np.float32 if self.numbers else np.int64)

    def _label(self, value: Any, name: str) -> float:
        where = f"{name}: column {self.column!r} (data.label) holds {show(value)}"
        if not self.numbers:
            if value not in self.table:
                raise DataError(f"{where}, which was not there when the run started. Start it again.")
            label: float = self.table[value]
            return label
        number = None if isinstance(value, str) and not self.untyped else read_number(value)
        if number is None:
            raise DataError(f"{where}, expected a finite number (data.label_type=number).")
        return number


class LabelledRows:
    """Samples of ``text-classification``.

    Args:
        table: Label in the files -> class of a sample.
    """

    def __init__(self, data: TextData, model: TextModel, table: Mapping[Any, Any]) -> None:
        self.data, self.model, self.labels = data, model, LabelReader(data, table)
        self.types = token_types(data.columns, model)
        self.arguments: dict[str, Any] = {"truncation": True, "max_length": data.options.max_length, **self.types}

    def __call__(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        texts = join_columns(self.data.parse_rows(rows, names), self.model)
        ids = flat(encode(self.model.tokenizer, texts, [], self.arguments))
        samples = Sequences(*ids, self.labels.read(rows, names), bool(self.types))
        return [samples[index] for index in range(len(samples))]


class LanguageRows:
    """Samples of ``causal-lm``: one a row, cut at ``max_length``.

    A row without a token to predict has no effect. If a micro-batch has only such rows, ``spare`` replaces the first:
    the mean over no token is not defined.
    """

    def __init__(self, data: LanguageTextData, model: TextModel, spare: Mapping[str, Any]) -> None:
        self.data, self.tokenizer, self.size = data, model.tokenizer, data.options.max_length
        self.spare = {name: value.copy() for name, value in spare.items()}
        self.end = [] if data.options.messages else end_of(model.tokenizer)
        self.encode = RowEncoder(model.tokenizer, self.end, data.options.train_on)

    def __call__(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        samples = self._masked(rows, names) if self.data.masked else self._plain(rows, names)
        if not any(
            (sample["targets"] >= 0).any() if "targets" in sample else len(sample["input_ids"]) > 1
            for sample in samples
        ):
            samples[0] = self.spare
        return samples

    def _plain(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        texts = self.data.parse_rows(rows, names)
        arguments = {"add_special_tokens": False, "verbose": False, "truncation": True, "max_length": self.size}
        ids = encode(self.tokenizer, texts, self.end, arguments)
        return [{"input_ids": np.array(row[: self.size], np.int32)} for row in ids]

    def _masked(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        samples = []
        for content, name in zip(self.data.parse_rows(rows, names), names, strict=True):
            found = MaskedSequences(*flat([self.encode(content, partial(str, name))]), self.size)
            empty = np.empty(0, np.int32)
            samples.append(found[0] if len(found) else {"input_ids": empty, "targets": empty})
        return samples

    def warn_about_length(self, texts: Sequence[Any]) -> None:
        """Log the share of texts that are cut."""
        probed = ["" if text is None else text for text in texts[:PROBED]]
        lengths = [
            len(ids)
            for ids in encode(self.tokenizer, probed, self.end, {"add_special_tokens": False, "verbose": False})
        ]
        if long := sum(length > self.size for length in lengths):
            logger.warning(
                "data: %d of %d rows have more than %d tokens (data.max_length), and are cut there: a streamed row is "
                "one sample. "
                "To train on all of a text, divide it into several rows",
                long, len(lengths), self.size,
            )  # fmt: skip


class Documents:
    """The tokens of some rows of ``causal-lm``, end to end: each text is followed by the end token, and empty texts are
    skipped."""

    def __init__(self, data: LanguageTextData, model: TextModel) -> None:
        self.data, self.tokenizer, self.end = data, model.tokenizer, end_of(model.tokenizer)

    def __call__(self, rows: list[Row], names: list[str]) -> NDArray[np.int32]:
        texts = [text for text in self.data.parse_rows(rows, names) if text.strip()]
        return flat(encode(self.tokenizer, texts, self.end, {"add_special_tokens": False, "verbose": False}))[0]


def blocks(rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
    """Samples of blocks of tokens, see ``text.streaming.blocks``."""
    return [{"input_ids": ids} for (ids,) in rows]
