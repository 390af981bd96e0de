"""Streamed rows as samples, in the data workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop.errors import DataError
from fastloop_plugins.rows.table import Bad, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.rows.index import Row, RowName
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.tokens import Split


def name_row_errors(rows: Iterator[list[int]], bad: Bad) -> Iterator[list[int]]:
    """Yield these rows, and call ``bad`` with the number and problem of the one whose ``RowError`` ends them."""
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except RowError as error:
        bad(count, str(error))


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
        from fastloop_plugins.text.streaming.dataset import LabelReader

        self.data = data
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.encode = encode
        self.build = build
        self.labels = LabelReader(data, table or {}) if data.labels else None

    def __call__(self, rows: list[Row], names: list[RowName]) -> list[dict[str, Any]]:
        from fastloop_plugins._mapped import flat
        from fastloop_plugins.text.tokens import Split

        def bad(index: int, problem: str) -> None:
            raise DataError(problem, code="invalid-row", place=str(names[index]))

        ids = self.encode(self.tokenizer, self.data.parse_rows(rows, names), self.arguments)
        labels = None if self.labels is None else self.labels.read(rows, names)
        samples = self.build(Split(*flat(name_row_errors(ids, bad)), labels), self.arguments)
        return [samples[index] for index in range(len(samples))]
