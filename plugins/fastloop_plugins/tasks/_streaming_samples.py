"""Turn streamed rows into samples, in the data workers. Each class is an ``Encoder`` of ``_streaming``: rows and their names -> samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import DataError
from fastloop_plugins._cache import flat
from fastloop_plugins.tasks._chat_data import problem_of_text
from fastloop_plugins.tasks._chat_tokens import encode_rows
from fastloop_plugins.tasks._lm_batches import MaskedSequences
from fastloop_plugins.tasks._streaming import Row
from fastloop_plugins.tasks._text_batches import Sequences
from fastloop_plugins.tasks._text_columns import Text, join_columns, token_types
from fastloop_plugins.tasks._text_files import show
from fastloop_plugins.tasks._text_targets import read_number
from fastloop_plugins.tasks._text_tokens import encode

if TYPE_CHECKING:
    from fastloop_plugins.tasks._chat_data import LanguageTextData
    from fastloop_plugins.tasks._text_data import TextData
    from fastloop_plugins.tasks._text_model import TextModel

logger = logging.getLogger("fastloop")

PROBED = 256
"""Rows to tokenize in full, to estimate how many are longer than a sample."""


def texts_of(rows: Sequence[Row], names: Sequence[str], columns: Sequence[str]) -> list[Text]:
    """The texts of each row; a missing text is empty.

    Raises:
        DataError: A value is no text.
    """
    texts: list[Text] = []
    for row, name in zip(rows, names, strict=True):
        cells = ["" if value is None else value for value in row[: len(columns)]]
        for column, cell in zip(columns, cells, strict=True):
            if problem := problem_of_text(cell):
                raise DataError(f"{name}: column {column!r} (data.text) {problem}")
        texts.append(cells[0] if len(cells) == 1 else tuple(cells))
    return texts


class LabelledRows:
    """Samples of ``text-classification``.

    Args:
        table: Label in the files -> class of a sample.
    """

    def __init__(self, data: TextData, model: TextModel, table: Mapping[Any, Any]) -> None:
        self.columns, self.label, self.model, self.table = data.columns, data.labels[0], model, table
        self.numbers = data.label_type == "number"
        self.types = token_types(data.columns, model)
        self.arguments: dict[str, Any] = {"truncation": True, "max_length": data.options.max_length, **self.types}

    def __call__(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        texts = join_columns(texts_of(rows, names, self.columns), self.model)
        labels = [self._label(row[-1], name) for row, name in zip(rows, names, strict=True)]
        found = np.array(labels, np.float32 if self.numbers else np.int64)
        samples = Sequences(*flat(encode(self.model.tokenizer, texts, [], self.arguments)), found, bool(self.types))
        return [samples[index] for index in range(len(samples))]

    def _label(self, value: Any, name: str) -> float:
        where = f"{name}: column {self.label!r} (data.label) holds {show(value)}"
        if not self.numbers:
            if value not in self.table:
                raise DataError(f"{where}, which was not there when the run started. Start it again.")
            label: float = self.table[value]
            return label
        number = None if isinstance(value, str) else read_number(value)
        if number is None:
            raise DataError(f"{where}, expected a finite number (data.label_type=number).")
        return number


class LanguageRows:
    """Samples of ``causal-lm``: one a row, cut at ``max_length``.

    A row without a token to predict has no effect. If a micro-batch has only such rows, ``spare`` replaces the first: the mean over no
    token is not defined.
    """

    def __init__(self, data: LanguageTextData, model: TextModel, spare: Mapping[str, Any]) -> None:
        self.data, self.tokenizer, self.size = data, model.tokenizer, data.options.max_length
        self.spare = {name: value.copy() for name, value in spare.items()}
        end = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else self.tokenizer.sep_token_id
        self.end = [] if end is None or data.options.messages else [end]

    def __call__(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        samples = self._masked(rows, names) if self.data.masked else self._plain(rows, names)
        if not any((sample["targets"] >= 0).any() if "targets" in sample else len(sample["input_ids"]) > 1 for sample in samples):
            samples[0] = self.spare
        return samples

    def _plain(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        texts = texts_of(rows, names, self.data.columns)
        arguments = {"add_special_tokens": False, "verbose": False, "truncation": True, "max_length": self.size}
        ids = encode(self.tokenizer, texts, self.end, arguments)
        return [{"input_ids": np.array(row[: self.size], np.int32)} for row in ids]

    def _masked(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        samples = []
        for row, name in zip(rows, names, strict=True):
            if problem := self.data.problem(row):
                raise DataError(f"{name}: {problem}")
            content = json.dumps(row[0] if len(row) == 1 else row, ensure_ascii=False)
            arguments = {"train_on": self.data.options.train_on}
            ids, lengths = flat(encode_rows(self.tokenizer, [content], self.end, arguments, lambda _, name=name: name))  # type: ignore[misc]
            found = MaskedSequences(ids, lengths, self.size)
            empty = np.empty(0, np.int32)
            samples.append(found[0] if len(found) else {"input_ids": empty, "targets": empty})
        return samples

    def warn_about_length(self, texts: Sequence[Any]) -> None:
        """Log the share of texts that are cut."""
        probed = ["" if text is None else text for text in texts[:PROBED]]
        lengths = [len(ids) for ids in encode(self.tokenizer, probed, self.end, {"add_special_tokens": False, "verbose": False})]
        if long := sum(length > self.size for length in lengths):
            logger.warning(
                "data: %d of %d rows have more than %d tokens (data.max_length), and are cut there: a streamed row is one sample. "
                "To train on all of a text, divide it into several rows",
                long, len(lengths), self.size,
            )  # fmt: skip
