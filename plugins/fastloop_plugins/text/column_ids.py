"""Rows of several texts, each of which is tokenized alone: their ids as one list of numbers, and as samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop_plugins.text.batches import Sequences, describe_cut
from fastloop_plugins.text.tokens import encode_marked, portions

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("fastloop")


def join_ids(parts: Iterable[tuple[Sequence[int], bool]]) -> list[int]:
    """One list for a row of several texts: ``2 * tokens + truncated`` of each text, and then the ids of each.

    Args:
        parts: The ids of each text, and whether truncation shortened it.
    """
    parts = list(parts)
    return [2 * len(ids) + cut for ids, cut in parts] + [token for ids, _ in parts for token in ids]


def encode_columns(tokenizer: Any, rows: Sequence[Any], arguments: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield ``join_ids`` of each row.

    Args:
        rows: A text, or a tuple of several.
        arguments: ``max_length``, which truncates each text.
    """
    options = {"truncation": True, "max_length": arguments["max_length"]}
    for portion in portions(rows):
        columns = zip(*((row,) if isinstance(row, str) else row for row in portion), strict=True)
        encoded = [encode_marked(tokenizer, texts, dict(options)) for texts in columns]
        yield from map(join_ids, zip(*encoded, strict=True))


class ColumnSequences(Sequences):
    """Rows of several texts. A sample has the ids of each text by the name of its column, (tokens,) int32.

    Args:
        names: The columns.
        ids: The rows of ``join_ids``, end to end.
        lengths: Length of every row.
        labels: As for ``Sequences``.

    Attributes:
        lengths: Tokens of all texts of a row.
    """

    def __init__(
        self,
        names: Sequence[str],
        ids: NDArray[np.int32],
        lengths: NDArray[np.int64],
        labels: NDArray[Any] | None = None,
    ) -> None:
        super().__init__(ids, lengths, labels)
        self.names, count = tuple(names), len(names)
        starts = self.ends - lengths
        facts = ids[starts[:, None] + np.arange(count)]  # (rows, columns)
        self.borders = np.cumsum(np.column_stack([starts + count, facts // 2]), axis=1)
        self.lengths, self.cut = lengths - count, (facts % 2).sum(0).tolist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        borders = self.borders[index]
        parts = zip(self.names, borders[:-1], borders[1:], strict=True)
        return {name: self.ids[start:end] for name, start, end in parts} | self.label(index)

    def warn(self, split: str, columns: Sequence[str], sizes: Sequence[tuple[str, int]]) -> None:
        """Log how many texts are cut.

        Args:
            columns: The name of each column's texts in messages.
            sizes: The option of ``data`` that limits each column, and its value.
        """
        for what, count, (option, size) in zip(columns, self.cut, sizes, strict=True):
            if count:
                logger.warning("%s", describe_cut(split, count, len(self), what, size, option))
