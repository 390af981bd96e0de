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
from fastloop_plugins.rows.index import Index, Reader, Row, RowName
from fastloop_plugins.rows.kept_results import kept_entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
        self.reader = make_reader()
        self.index = index
        self.counts = counts
        self.size = size
        self.encode = encode
        self.source_starts = np.array([*sources, len(counts)])  # the row groups of source 0 end where those of 1 start

    def read(self, group: int, skip: int) -> Iterator[Row]:
        """Yield the ids (tokens,) int32 of each block that begins in a row group, without the first ``skip`` blocks.

        Two row groups of 6 and 5 tokens have these blocks of 4 tokens::

            row group    0 0 0 0 0 0 1 1 1 1 1
            block        0 0 0 0 1 1 1 1 2 2 2

        Row group 0 has the blocks 0 and 1. Row group 1 has block 2: its first 2 tokens belong to block 1.

        Raises:
            DataError: A file was changed, or cannot be read.
        """
        blocks_left = int(self.index.rows[group]) - skip
        if blocks_left <= 0:
            return
        source = int(np.searchsorted(self.source_starts, group, side="right")) - 1
        first_group = int(self.source_starts[source])
        end_group = int(self.source_starts[source + 1])
        tokens_before = int(self.counts[first_group:group].sum())  # of the source, in earlier row groups
        blocks_before = -(-tokens_before // self.size)  # rounded up: the last one ends in this row group or later
        tokens_to_skip = (blocks_before + skip) * self.size - tokens_before  # 2 for row group 1
        rest = np.empty(0, np.int32)  # tokens that are in no block yet
        for tokens in self._tokens(group, end_group):
            if tokens_to_skip >= len(tokens):
                tokens_to_skip -= len(tokens)
                continue
            rest = np.concatenate([rest, tokens[tokens_to_skip:]])
            tokens_to_skip = 0
            complete = min(len(rest) // self.size, blocks_left)
            for start in range(0, complete * self.size, self.size):
                yield (rest[start : start + self.size],)
            blocks_left -= complete
            if not blocks_left:
                return
            rest = rest[complete * self.size :]
        is_last_and_short = blocks_left == 1 and len(rest) > 1  # one token has no next token to predict
        if not is_last_and_short:
            raise DataError(
                "has fewer tokens than when the run started.",
                code="data-changed",
                place=str(self.index.paths[self.index.file[group]]),
                remedy="Start it again.",
            )
        yield (rest,)

    def _tokens(self, group: int, end: int) -> Iterator[NDArray[np.int32]]:
        """The tokens from the start of a row group to the end of its source, those of some rows at a time."""
        for number in range(group, end):
            total = 0
            rows_at_once = ROWS_AT_ONCE if number == group else REST
            for tokens in tokens_of(self.reader, number, self.encode, rows_at_once):
                total += len(tokens)
                yield tokens
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
    rows = reader.read(group, 0)
    row = int(reader.index.firsts[group])
    batch = list(islice(rows, size))
    while batch:
        names = [reader.index.name(row + number) for number in range(len(batch))]
        yield encode(batch, names)
        row += len(batch)
        batch = list(islice(rows, size))


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
    entry = None
    if tokenizer is not None:
        entry = kept_entry(["tokens", tokenizer, *columns, *index.facts], index.paths)
    kept_counts = None if entry is None else _read_counts(entry, len(index.rows))
    if all(run.processes.all_gather_object(kept_counts is not None)):
        assert kept_counts is not None
        return kept_counts
    logger.info("data: counting the tokens of %d rows in %d row groups, once", int(index.rows.sum()), len(index.rows))
    counts: NDArray[np.int64] = np.zeros(len(index.rows), np.int64)
    for group in range(run.rank, len(counts), run.world_size):
        counts[group] = sum(map(len, tokens_of(reader, group, encode, ROWS_AT_ONCE)))
    reader.close()
    counts = np.sum(run.processes.all_gather_object(counts), axis=0)
    if entry is not None and run.is_main:
        with _cache.written(entry) as folder:
            np.save(folder / "tokens.npy", counts, allow_pickle=False)
    return counts


def _read_counts(entry: Path, groups: int) -> NDArray[np.int64] | None:
    """The result that ``count_tokens`` kept in an entry of the cache, for this number of row groups; None if it is
    missing or damaged."""
    if not (entry / "tokens.npy").is_file():
        return None
    try:
        counts: NDArray[np.int64] = np.load(entry / "tokens.npy", allow_pickle=False)
        if len(counts) != groups:
            raise ValueError(f"{len(counts)} counts, expected {groups}")
        return counts
    except (OSError, ValueError, TypeError, EOFError) as error:
        _cache.remove_damaged(entry, error, "the tokens are counted again", "tokens")
        return None


def index_blocks(index: Index, counts: NDArray[np.int64], sources: Sequence[int], size: int, where: str) -> Index:
    """The row groups with their number of blocks. A group whose tokens all belong to an earlier block has none.

    Raises:
        RecipeError: A source has no two tokens.
    """
    rows: list[Any] = []
    for tokens in np.split(counts, list(sources[1:])):
        ends = np.cumsum(tokens)
        total = int(ends[-1])
        blocks = total // size
        if total % size > 1:  # one token has no next token to predict
            blocks += 1
        if not blocks:
            raise RecipeError(
                "the train split, or a source of data.mix, has no two tokens: there is no next token to learn.",
                code="too-few-tokens",
                place=where,
            )
        # for row groups of 6 and 5 tokens, and blocks of 4 tokens, [2, 3]: 2 blocks begin in the first, 3 in both
        begun = np.minimum(-(-ends // size), blocks)
        rows.append(np.diff(begun, prepend=0))
    return replace(index, rows=np.concatenate(rows).astype(np.int64), labels={}, layout=None)
