"""Blocks of fixed length from streamed texts, put end to end: the samples of a language model as it has them in memory.

The number of blocks follows from the tokens, so the tokens of each row group are counted before training. A block
belongs to the row group that it begins in, and ends in a later one if need be. So a position of an epoch has one block,
for any number of readers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import DataError, RecipeError
from fastloop_plugins import _cache
from fastloop_plugins.rows.formats import ROWS_AT_ONCE
from fastloop_plugins.rows.index import Index, Reader, Row, RowName, kept_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fastloop import Run

    Tokens = Callable[[list[Row], list[RowName]], NDArray[np.int32]]
    """Columns and names of some rows -> the ids of all their tokens, end to end."""

logger = logging.getLogger("fastloop")

REST = 8
"""Rows to tokenize at once in order to complete a block in the next row group, which needs few of them."""


class BlockReader:
    """Reads the blocks of a row group. It takes the place of a ``Reader``: a block is a row, with one column.

    Args:
        make_reader: Returns a reader of the rows.
        index: The row groups, with blocks for rows.
        counts: (row groups,) tokens of each.
        sources: The first row group of each source, whose texts are put end to end.
        size: Tokens of a block. The last block of a source may have fewer.
    """

    def __init__(
        self,
        make_reader: Callable[[], Any],
        index: Index,
        counts: NDArray[np.int64],
        sources: Sequence[int],
        size: int,
        encode: Tokens,
    ) -> None:
        self.reader, self.index, self.counts, self.size, self.encode = (
            make_reader(),
            index,
            counts,
            size,
            encode,
        )
        self.sources = np.array([*sources, len(counts)])

    def read(self, group: int, skip: int) -> Iterator[Row]:
        """Yield the ids (tokens,) int32 of each block that begins in a row group, without the first ``skip`` blocks.

        Raises:
            DataError: A file was changed, or cannot be read.
        """
        left = int(self.index.rows[group]) - skip
        if left <= 0:
            return
        source = int(np.searchsorted(self.sources, group, side="right"))
        first, end = int(self.sources[source - 1]), int(self.sources[source])
        before = int(self.counts[first:group].sum())
        # tokens of the group that belong to earlier blocks
        lead = (-(-before // self.size) + skip) * self.size - before
        ids = np.empty(0, np.int32)
        for found in self._tokens(group, end):
            if lead >= len(found):
                lead -= len(found)
                continue
            ids, lead = np.concatenate([ids, found[lead:]]), 0
            for start in range(0, min(left, len(ids) // self.size) * self.size, self.size):
                yield (ids[start : start + self.size],)
                left -= 1
            if not left:
                return
            ids = ids[len(ids) // self.size * self.size :]
        if left == 1 and len(ids) > 1:
            yield (ids,)
            return
        raise DataError(
            "has fewer tokens than when the run started.",
            code="data-changed",
            place=str(self.index.paths[self.index.file[group]]),
            remedy="Start it again.",
        )

    def _tokens(self, group: int, end: int) -> Iterator[NDArray[np.int32]]:
        """The tokens from the start of a row group to the end of its source, those of some rows at a time."""
        for number in range(group, end):
            total = 0
            for found in tokens_of(self.reader, number, self.encode, ROWS_AT_ONCE if number == group else REST):
                total += len(found)
                yield found
            if total != self.counts[number]:
                path = self.index.paths[self.index.file[number]]
                raise DataError(
                    f"a row group has {total} tokens, and had {self.counts[number]} when the run started.",
                    code="data-changed",
                    place=str(path),
                    remedy="Start it again; if that does not help, remove the folder of token-cache.",
                )

    def close(self) -> None:
        """Close the files."""
        self.reader.close()


def tokens_of(reader: Reader, group: int, encode: Tokens, size: int) -> Iterator[NDArray[np.int32]]:
    """The tokens of a row group, those of ``size`` rows at a time."""
    rows, row = reader.read(group, 0), int(reader.index.firsts[group])
    while batch := list(islice(rows, size)):
        yield encode(batch, [reader.index.name(row + number) for number in range(len(batch))])
        row += len(batch)


def count_tokens(
    run: Run, make_reader: Callable[[], Any], columns: Sequence[str], encode: Tokens, tokenizer: str | None
) -> NDArray[np.int64]:
    """(row groups,) the tokens of each. Reads all texts once, divided among the processes. ``token-cache`` keeps the
    result.

    Args:
        tokenizer: A hash of the tokenizer; None: the result cannot be kept.
    """
    reader = make_reader()
    index: Index = reader.index
    kept = None if tokenizer is None else kept_entry(["tokens", tokenizer, *columns, *index.facts], index.paths)
    there = kept is not None and (kept / "tokens.npy").is_file()
    if all(run.processes.all_gather_object(there)):
        assert kept is not None
        counts: NDArray[np.int64] = np.load(kept / "tokens.npy", allow_pickle=False)
        return counts
    logger.info("data: counting the tokens of %d rows in %d row groups, once", int(index.rows.sum()), len(index.rows))
    counts = np.zeros(len(index.rows), np.int64)
    for group in range(run.rank, len(counts), run.world_size):
        counts[group] = sum(map(len, tokens_of(reader, group, encode, ROWS_AT_ONCE)))
    reader.close()
    counts = np.sum(run.processes.all_gather_object(counts), axis=0)
    if kept is not None and run.is_main:
        with _cache.written(kept) as made:
            np.save(made / "tokens.npy", counts, allow_pickle=False)
    return counts


def index_blocks(index: Index, counts: NDArray[np.int64], sources: Sequence[int], size: int, where: str) -> Index:
    """The row groups with their number of blocks. A group whose tokens all belong to an earlier block has none.

    Raises:
        RecipeError: A source has no two tokens.
    """
    rows: list[Any] = []
    for tokens in np.split(counts, list(sources[1:])):
        ends = np.cumsum(tokens)
        total = int(ends[-1])
        blocks = total // size + (total % size > 1)  # one token has no next token to predict
        if not blocks:
            raise RecipeError(
                "the train split, or a source of data.mix, has no two tokens: there is no next token to learn.",
                code="too-few-tokens",
                place=where,
            )
        rows.append(np.diff(np.minimum(-(-ends // size), blocks), prepend=0))
    return replace(index, rows=np.concatenate(rows).astype(np.int64), labels={}, layout=None)
