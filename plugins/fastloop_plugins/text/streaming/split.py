"""The streamed training split of a text task: its files, their index, and its first rows.

The task reads the first rows of a fixed order into memory, and checks them as the whole split of another run. The
trained tokenizer, the classes and warnings about rows follow from them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import RecipeError
from fastloop.problem import counted
from fastloop_plugins.rows.column import Column
from fastloop_plugins.rows.formats import is_untyped
from fastloop_plugins.rows.index import Reader, read_index
from fastloop_plugins.rows.order import CYCLE, Order, count_samples
from fastloop_plugins.rows.table import Table
from fastloop_plugins.text.label_warnings import ROWS_OF_A_RARE_CLASS
from fastloop_plugins.text.sources import empty_share
from fastloop_plugins.text.streaming.dataset import StreamedDataset
from fastloop_plugins.text.streaming.windows import Windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Run
    from fastloop_plugins.rows.file import ColumnName
    from fastloop_plugins.rows.index import Index, Row
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.streaming.blocks import BlockReader, Tokens
    from fastloop_plugins.text.streaming.dataset import Encoder

logger = logging.getLogger("fastloop")

HEAD = 4096
"""Rows in memory that stand for the training split in checks, and that a tokenizer is trained on."""
COPIES = ROWS_OF_A_RARE_CLASS
"""Rows of each class that are added to them at most. With fewer, a class would get a warning that it is rare."""


@dataclass(frozen=True)
class FoundFiles:
    """The files of the training split as a process reads them.

    Attributes:
        files: Number of files.
        rows: Number of their rows.
        digest: A hash of facts about their content.
    """

    files: int
    rows: int
    digest: str


class StreamedSplit:
    """``data.streaming`` of a recipe: its files, and, once opened, their index and first rows.

    Args:
        entries: The files of each source.

    Attributes:
        weights: The share of each source; None: each row comes once.

    Raises:
        RecipeError: A file comes twice, or a source has no sample in a cycle.
    """

    def __init__(self, data: TextData, entries: list[list[str]]) -> None:
        self.data = data
        self.entries = entries
        self.columns: list[str]  # this and the next attributes: from read_head on
        self.index: Index
        self.first_groups: list[int]  # the first row group of each source
        self.groups: list[NDArray[np.int64]]  # source -> rows of each of its row groups
        self.make_reader: Callable[[], Reader | BlockReader]
        self.head: Table
        weights = data.options.mix or [source.weight for source in data.sources if source.weight is not None]
        self.weights: Sequence[float] | None = weights or None
        self._check_shares()
        paths = self.paths
        if self.weights is None:
            self.entries = [paths]
            if len(set(paths)) < len(paths) and not data.sources:
                twice = next(path for path in paths if paths.count(path) > 1)
                raise RecipeError(
                    f"{twice} is listed twice, and its rows would come twice an epoch.",
                    code="listed-twice",
                    place=f"{data.where}.files.train",
                    remedy="Name it once, or give each source a share with data.mix.",
                )

    def _check_shares(self) -> None:
        """Raise an error for a source whose weight is so small that its rows would never be read."""
        if self.weights is None:
            return
        for number, samples in enumerate(count_samples(self.weights)):
            if samples:
                continue
            key = f"sources[{number}].weight" if self.data.sources else f"mix[{number}]"
            share = self.weights[number] / sum(self.weights)
            whole = f"{CYCLE} samples that a stream divides by the weights"
            raise empty_share(share, whole, f"{self.data.where}.{key}")

    @property
    def paths(self) -> list[str]:
        """All files."""
        return list(chain.from_iterable(self.entries))

    def read_head(self) -> Table:
        """Index the files, and read the rows that stand for the training split: the first ones, and some of each class.

        Raises:
            RecipeError: A file has no rows, or not the columns of the section.
        """
        data = self.data
        labels = list(data.label_columns())
        self.columns = [*data.text_columns(), *data.optional_text_columns(), *labels]
        counted_column = labels[0] if labels and data.label_type == "class" else None
        layout = replace(data.layout(), drop=data.drop, names=self._list_column_names())
        index = read_index(self.paths, layout, counted_column, lists=data.tagged)
        self.first_groups = self._find_first_groups(index)
        self._set_groups(index)
        self.make_reader = partial(Reader, index, layout, self.columns)
        numbers: list[int] = []
        rows: list[Row] = []
        for number, row in self._read_first_rows():
            numbers.append(number)
            rows.append(row)
        if not data.tagged:
            for number, row in self._make_rows_of_classes(rows[0]):
                numbers.append(number)
                rows.append(row)
        self.head = self._make_table(numbers, rows)
        return self.head

    def _find_first_groups(self, index: Index) -> list[int]:
        """The first row group of each source.

        Sources of 2 and 1 files begin with the files 0 and 2. With row groups of the files [0, 0, 1, 2], it is [0, 3].
        """
        first_files = []
        files_before = 0
        for files in self.entries:
            first_files.append(files_before)
            files_before += len(files)
        groups: list[int] = np.searchsorted(index.file, first_files).tolist()
        return groups

    def _read_first_rows(self) -> Iterator[tuple[int, Row]]:
        """Yield number and columns of the first rows in the order of seed 0: the same ones for every ``train.seed``."""
        order = self.order_factory(seed=0, batch_size=1)()
        with closing(self.make_reader()) as reader:
            windows = Windows(order, reader, self.first_groups)
            for position in range(min(HEAD, order.size)):
                yield windows.row(order.locate(0, position))

    def _make_rows_of_classes(self, example: Row) -> Iterator[tuple[int, Row]]:
        """Yield rows of each class with their numbers: a rare class may have none among the first rows. They are copies
        of ``example`` with the label of the class, and have the number of the class's first row.

        If ``example`` is ("fine", "good"), a class "bad" of 2 rows has 2 copies of ("fine", "bad"). The class "good" of
        900 rows has ``COPIES`` copies of ("fine", "good").
        """
        for label, own in self.index.labels.items():
            row = (*example[:-1], label)  # the label is the last column
            for _ in range(min(own.rows, COPIES)):
                yield own.first, row

    def _make_table(self, numbers: list[int], rows: list[Row]) -> Table:
        """The table of some rows, with their numbers in the index."""
        index = self.index
        where = str(index.paths[0])
        if len(index.paths) > 1:
            where += f" and {len(index.paths) - 1} more"
        columns: dict[str, Column] = {}
        for place, name in enumerate(self.columns):
            columns[name] = Column(row[place] for row in rows)
        return Table(
            where,
            columns,
            untyped=all(map(is_untyped, index.paths)),
            places=[index.name(number) for number in numbers],
            sampled=True,
            label_counts={label: own.rows for label, own in index.labels.items()},
            class_names=index.class_names,
        )

    def _list_column_names(self) -> list[dict[str, ColumnName]]:
        """The names of the columns in each file, with ``data.sources``; else empty."""
        data = self.data
        names: list[dict[str, ColumnName]] = []
        for source in data.sources:
            names += [source.names(data)] * len(source.shards)
        return names

    def _describe_sources(self) -> str:
        """The rows and the share of each source of a mix, for the log."""
        if self.weights is None:
            return ""
        key = "data.sources" if self.data.sources else "data.files.train"
        lines: list[str] = []
        for number, (rows, samples) in enumerate(zip(self.groups, count_samples(self.weights), strict=True)):
            lines.append(f"{key}[{number}] {int(rows.sum())}, {samples / CYCLE:.1%} of the samples")
        return f" ({'; '.join(lines)})"

    def _set_groups(self, index: Index) -> None:
        """Set the row groups of each source. Raises an error for a source that is too small for the lanes."""
        self.index = index
        self.groups = np.split(index.rows, self.first_groups[1:])  # with [0, 2]: groups 0 and 1, and from 2 on
        lanes = self.data.options.lanes
        for paths, rows in zip(self.entries, self.groups, strict=True):
            if self.weights is not None and rows.sum() < lanes:
                key = "sources" if self.data.sources else "mix"
                raise RecipeError(
                    f"{paths[0]} has {counted(int(rows.sum()), 'sample')}, and data.lanes is {lanes}.",
                    code="too-few-rows",
                    place=f"{self.data.where}.{key}",
                    remedy=f"Set data.lanes to at most {int(rows.sum())}.",
                )

    def put_end_to_end(self, run: Run, encode: Tokens, size: int, tokenizer: str | None) -> None:
        """Make blocks of ``size`` tokens the samples, instead of rows. Every process must call it.

        Args:
            tokenizer: A hash of the tokenizer, to keep the counts of tokens; None: do not keep them.
        """
        from fastloop_plugins.text.streaming.blocks import BlockReader, count_tokens, index_blocks

        self.check_processes(run)
        texts = self.index
        make_reader = self.make_reader
        counts = count_tokens(run, make_reader, self.columns, encode, tokenizer)
        self._set_groups(index_blocks(texts, counts, self.first_groups, size, self.data.where))
        self.make_reader = partial(BlockReader, make_reader, self.index, counts, self.first_groups, size, encode)
        logger.info("data: train: %d tokens in %d blocks of %d", int(counts.sum()), int(self.index.rows.sum()), size)

    def check_processes(self, run: Run) -> None:
        """Raise an error if another process found other files. Every process must call it."""
        index = self.index
        digest = hashlib.blake2b(json.dumps(index.facts).encode()).hexdigest()
        own = FoundFiles(len(index.paths), int(index.rows.sum()), digest)
        by_rank: list[FoundFiles] = run.processes.all_gather_object(own)
        first = by_rank[0]
        for rank, files in enumerate(by_rank):
            if files == first:
                continue
            of_first = f"{first.files} with {first.rows}"
            if (files.files, files.rows) == (first.files, first.rows):
                of_first += ", of other content"
            raise RecipeError(
                f"process {rank} found {counted(files.files, 'file')} with {counted(files.rows, 'row')}, and process 0 "
                f"{of_first}. Every process must read the same files: compare them on the machines.",
                code="processes-disagree",
                place=f"{self.data.where}.files.train",
            )

    def order_factory(self, seed: int, batch_size: int) -> Callable[[], Order]:
        """A function that builds the order of the samples. Each reader of the dataset calls it in its own process.

        Args:
            seed: ``train.seed``.
            batch_size: ``train.batch_size``.
        """
        options = self.data.options
        return partial(Order, self.groups, self.weights, seed, options.lanes, options.shuffle_buffer, batch_size)

    def describe_size(self) -> dict[str, str]:
        """The split ``train`` -> its size in words, for the log."""
        index = self.index
        return {
            "train": f"train {int(index.rows.sum())}, streamed from {counted(len(index.rows), 'row group')} in "
            f"{counted(len(index.paths), 'file')}{self._describe_sources()}"
        }

    def label_table(self, loaded: Mapping[str, Any]) -> dict[Any, Any]:
        """Label in the files -> label of a sample."""
        labels = loaded["train"].labels
        if labels is None:
            return {}
        in_files = self.head.columns[self.data.labels[0]]
        return dict(zip(in_files, labels.tolist(), strict=True))

    def datasets(self, run: Run, loaded: Mapping[str, Any], encode: Encoder) -> dict[str, Any]:
        """The datasets of a run: ``train`` is streamed, and the others are as ``loaded``. Every process must call
        it."""
        self.check_processes(run)
        order = self.order_factory(run.recipe.train.seed, run.recipe.train.batch_size)
        return {
            **loaded,
            "train": StreamedDataset(
                self.index, self.make_reader, self.first_groups, order, encode, self.weights is not None
            ),
        }
