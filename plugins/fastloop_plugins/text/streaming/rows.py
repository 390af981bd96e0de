"""Streamed rows as samples, and their labels, in the data workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import DataError
from fastloop_plugins._mapped import flat
from fastloop_plugins.rows.drop import drop_line
from fastloop_plugins.rows.table import Bad, RowError, propose_cast, show
from fastloop_plugins.text.columns import join_columns, token_types
from fastloop_plugins.text.encoding import encode
from fastloop_plugins.text.label_column import is_unlabelled
from fastloop_plugins.text.sequences import Sequences
from fastloop_plugins.text.targets import propose_point, read_number
from fastloop_plugins.text.tokens import Split

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.rows.index import Row, RowName
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel


def name_row_errors(rows: Iterator[list[int]], bad: Bad) -> Iterator[list[int]]:
    """Yield these rows, and call ``bad`` with the number and problem of the one whose ``RowError`` ends them."""
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except RowError as error:
        bad(count, str(error))


class LabelReader:
    """Reads the labels of streamed rows.

    Args:
        table: Label in the files -> class of a sample.
    """

    def __init__(self, data: TextData, table: Mapping[Any, Any]) -> None:
        self.column = data.labels[0]
        self.table = table
        self.numbers = data.label_type == "number"
        self.untyped = data.stream is not None and data.stream.head.untyped

    def read(self, rows: list[Row], names: list[RowName]) -> NDArray[Any]:
        """The labels of rows: classes int64, or numbers float32.

        Raises:
            DataError: A label is no number, or was not there when the run started.
        """
        labels = [self._label(row[-1], name) for row, name in zip(rows, names, strict=True)]
        return np.array(labels, np.float32 if self.numbers else np.int64)

    def _label(self, value: Any, name: RowName) -> float:
        problem = f"column {self.column!r} (data.label) holds {show(value)}"
        if not self.numbers:
            if value not in self.table:
                raise DataError(
                    f"{problem}, which was not there when the run started.",
                    code="data-changed",
                    place=str(name),
                    remedy="Start it again.",
                )
            label: float = self.table[value]
            return label
        number = read_number(value, self.untyped)
        if number is not None:
            return number
        remedy = propose_point(value) if self.untyped else propose_cast(value)
        if is_unlabelled(value):
            remedy = f" {drop_line(self.column, 'empty: true')}"
        raise DataError(
            f"{problem}, expected a finite number (data.label_type=number).",
            code="wrong-label",
            place=str(name),
            remedy=remedy,
        )


class LabelledRows:
    """Samples of ``text-classification``.

    Args:
        table: Label in the files -> class of a sample.
    """

    def __init__(self, data: TextData, model: TextModel, table: Mapping[Any, Any]) -> None:
        self.data = data
        self.model = model
        self.labels = LabelReader(data, table)
        self.types = token_types(data.columns, model)
        self.arguments: dict[str, Any] = {"truncation": True, "max_length": data.options.max_length, **self.types}

    def __call__(self, rows: list[Row], names: list[RowName]) -> list[dict[str, Any]]:
        texts = join_columns(self.data.parse_rows(rows, names), self.model)
        ids = flat(encode(self.model.tokenizer, texts, self.arguments))
        samples = Sequences(*ids, self.labels.read(rows, names), bool(self.types))
        return [samples[index] for index in range(len(samples))]


class StreamedRows:
    """Turns streamed rows into samples, in the data workers.

    Args:
        encode: As ``TextTask.encode``.
        build: As ``TextTask.build_dataset``.
        arguments: The arguments of both.
        table: Label in the files -> label of a sample.
    """

    def __init__(
        self,
        data: TextData,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[Any, Sequence[Any], Mapping[str, Any]], Iterator[list[int]]],
        build: Callable[[Split, Mapping[str, Any]], Any],
        arguments: Mapping[str, Any],
        table: Mapping[Any, Any] | None = None,
    ) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.encode = encode
        self.build = build
        self.labels = LabelReader(data, table or {}) if data.labels else None

    def __call__(self, rows: list[Row], names: list[RowName]) -> list[dict[str, Any]]:
        def bad(index: int, problem: str) -> None:
            raise DataError(problem, code="invalid-row", place=str(names[index]))

        ids = self.encode(self.tokenizer, self.data.parse_rows(rows, names), self.arguments)
        labels = None if self.labels is None else self.labels.read(rows, names)
        samples = self.build(Split(*flat(name_row_errors(ids, bad)), labels), self.arguments)
        return [samples[index] for index in range(len(samples))]
