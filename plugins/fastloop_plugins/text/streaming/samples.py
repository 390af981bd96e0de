"""Turn streamed rows into samples, in the data workers.

Each class is an ``Encoder`` of ``text.streaming.dataset``: rows and their names -> samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import DataError
from fastloop_plugins._cache import flat
from fastloop_plugins.rows.index import Row
from fastloop_plugins.rows.table import show
from fastloop_plugins.text.batches import Sequences
from fastloop_plugins.text.columns import join_columns, token_types
from fastloop_plugins.text.targets import read_number
from fastloop_plugins.text.tokens import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel


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
