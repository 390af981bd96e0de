"""The streamed training split of a text task: an iterable dataset that reads any range of positions of an epoch.

A row is a sample, or a block of tokens is (``blocks``). The task reads the first rows of a fixed order into memory,
and checks them as the whole split of another run. The trained tokenizer, the classes and warnings about rows
follow from them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from fastloop.errors import DataError, RecipeError
from fastloop.problem import counted
from fastloop_plugins._mapped import flat
from fastloop_plugins.rows.column import Column
from fastloop_plugins.rows.drop import drop_line
from fastloop_plugins.rows.formats import is_untyped
from fastloop_plugins.rows.index import Reader, read_index
from fastloop_plugins.rows.order import Order
from fastloop_plugins.rows.table import Table, show
from fastloop_plugins.text.batches import Sequences
from fastloop_plugins.text.columns import join_columns, token_types
from fastloop_plugins.text.label_column import is_unlabelled
from fastloop_plugins.text.streaming.windows import Windows
from fastloop_plugins.text.targets import propose_point, read_number
from fastloop_plugins.text.tokens import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Run
    from fastloop_plugins.rows.index import Index, Row, RowName
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.streaming.blocks import BlockReader, Tokens

    Encoder = Callable[[list[Row], list[RowName]], list[dict[str, Any]]]
    """Columns and names of some rows -> their samples. A data worker calls it."""

logger = logging.getLogger("fastloop")

HEAD = 4096
"""Rows in memory that stand for the training split in checks, and that a tokenizer is trained on."""
COPIES = 5
"""Rows of each label among them at most, beside the first rows: fewer would be a warning about a rare class."""


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


class Streamed(IterableDataset[Any]):
    """A streamed split.

    Args:
        make_reader: Returns a reader of rows, or of blocks. Each process that reads calls it.
        sources: The first row group of each source.
        make_order: Returns the order of the rows. Each process that reads calls it.
        repeats: Whether sources start again within an epoch. Then an id also has the number of the pass:
            ``pass * len(self) + row``.
    """

    def __init__(
        self,
        index: Index,
        make_reader: Callable[[], Reader | BlockReader],
        sources: Sequence[int],
        make_order: Callable[[], Order],
        encode: Encoder,
        repeats: bool = False,
    ) -> None:
        self.index = index
        self.make_reader = make_reader
        self.sources = list(sources)
        self.make_order = make_order
        self.encode = encode
        self.repeats = repeats
        self.size = int(index.rows.sum())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The sample of a row, which is read from its file: for checks of single samples."""
        group = self.index.group_of(row)
        with closing(self.make_reader()) as reader:
            values = next(reader.read(group, row - int(self.index.firsts[group])))
        return self.encode([values], [self.index.name(row)])[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The samples of the first epoch."""
        one_by_one = (range(position, position + 1) for position in range(self.size))
        for samples in self.read_ranges(0, one_by_one):
            for _, sample in samples:
                yield sample

    def read_ranges(self, epoch: int, ranges: Iterable[range]) -> Iterator[list[tuple[int, Any]]]:
        """See ``fastloop.data.DatasetProtocol``. A sample's id is its row's number, counted over all files; see also
        ``repeats``."""
        if get_worker_info() is not None:
            # the tokenizer's threads did not survive the fork: it would wait for them
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        order = self.make_order()
        with closing(self.make_reader()) as reader:
            windows = Windows(order, reader, self.sources)
            for positions in ranges:
                ids: list[int] = []
                rows: list[Row] = []
                names: list[RowName] = []
                for position in positions:
                    place = order.locate(epoch, position)
                    number, row = windows.row(place)
                    # with 10 rows, row 3 of the passes 0, 1 and 2 has the ids 3, 13 and 23
                    ids.append(number + self.size * place.turn if self.repeats else number)
                    rows.append(row)
                    names.append(self.index.name(number))
                yield list(zip(ids, self.encode(rows, names), strict=True))

    def fingerprint(self) -> str:
        """A hash of the sizes and checksums of the files' row groups."""
        return hashlib.blake2b(json.dumps(self.index.facts).encode(), digest_size=8).hexdigest()


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
        remedy = propose_point(value) if self.untyped else ""
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


class Streaming:
    """``data.streaming`` of a recipe: its files, and, once opened, their index and first rows.

    Args:
        entries: The files of each source.

    Attributes:
        weights: The share of each source; None: each row comes once.

    Raises:
        RecipeError: A file comes twice.
    """

    def __init__(self, data: TextData, entries: list[list[str]]) -> None:
        self.data = data
        self.entries = entries
        self.columns: list[str]  # this and the next attributes: from read_head on
        self.index: Index
        self.sources: list[int]  # the first row group of each source
        self.groups: list[NDArray[np.int64]]  # source -> rows of each of its row groups
        self.make_reader: Callable[[], Reader | BlockReader]
        self.head: Table
        weights = data.options.mix or [source.weight for source in data.sources if source.weight is not None]
        self.weights: Sequence[float] | None = weights or None
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

    @property
    def paths(self) -> list[str]:
        """All files."""
        return list(chain.from_iterable(self.entries))

    def read_head(self) -> Table:
        """Index the files, and read the rows that stand for the training split.

        Raises:
            RecipeError: A file has no rows, or not the columns of the section.
        """
        data = self.data
        labels = data.label_columns()
        self.columns = [*data.text_columns(), *data.optional_columns(), *labels]
        counted = next(iter(labels), None) if data.label_type == "class" else None
        layout = replace(data.layout(), drop=data.drop, names=self._names())
        index = read_index(self.paths, layout, counted, lists=data.tagged)
        # entries of 2 and 1 files begin with the files 0 and 2: with row groups of the files [0, 0, 1, 2], sources is
        # [0, 3]
        first_files = []
        files_before = 0
        for files in self.entries:
            first_files.append(files_before)
            files_before += len(files)
        self.sources = np.searchsorted(index.file, first_files).tolist()
        self._set_groups(index)
        order = self.order(0, 1)()
        self.make_reader = partial(Reader, index, layout, self.columns)
        rows: list[Row] = []
        names: list[RowName] = []
        with closing(self.make_reader()) as reader:
            windows = Windows(order, reader, self.sources)
            for position in range(min(HEAD, order.size)):
                number, row = windows.row(order.locate(0, position))
                rows.append(row)
                names.append(index.name(number))
        if not data.tagged:
            for value, (count, first) in index.labels.items():
                # a rare class has no row among the first ones: stand-ins, with a label of their own
                stand_in = (*rows[0][:-1], value)  # the label is the last column
                for _ in range(min(count, COPIES)):
                    rows.append(stand_in)
                    names.append(index.name(first))
        where = str(index.paths[0])
        if len(index.paths) > 1:
            where += f" and {len(index.paths) - 1} more"
        table = dict(zip(self.columns, map(Column, zip(*rows, strict=True)), strict=True))
        self.head = Table(
            where,
            table,
            untyped=all(map(is_untyped, index.paths)),
            places=names,
            sampled=True,
            label_counts={label: count for label, (count, _) in index.labels.items()},
            class_names=index.class_names,
        )
        return self.head

    def _names(self) -> list[dict[str, tuple[str, str]]]:
        """The names of the columns in each file, with ``data.sources``; else empty."""
        data = self.data
        names: list[dict[str, tuple[str, str]]] = []
        for source in data.sources:
            names += [source.names(data)] * len(source.shards)
        return names

    def _describe_sources(self) -> str:
        """The rows and the share of each source of a mix, for the log."""
        if self.weights is None:
            return ""
        total = sum(self.weights)
        key = "data.sources" if self.data.sources else "data.files.train"
        lines: list[str] = []
        for number, (counts, weight) in enumerate(zip(self.groups, self.weights, strict=True)):
            lines.append(f"{key}[{number}] {int(counts.sum())}, {weight / total:.1%} of the samples")
        return f" ({'; '.join(lines)})"

    def _set_groups(self, index: Index) -> None:
        """Set the row groups of each source. Raises an error for a source that is too small for the lanes."""
        self.index = index
        self.groups = np.split(index.rows, self.sources[1:])  # sources [0, 2]: groups 0 and 1, and those from 2 on
        lanes = self.data.options.lanes
        for paths, rows in zip(self.entries, self.groups, strict=True):
            if self.weights is not None and rows.sum() < lanes:
                key = "sources" if self.data.sources else "mix"
                raise RecipeError(
                    f"{paths[0]} has {counted(int(rows.sum()), 'sample')}, and data.lanes is {lanes}.",
                    code="too-few-rows",
                    place=f"{self.data.where}.{key}",
                    remedy="Set data.lanes to fewer.",
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
        self._set_groups(index_blocks(texts, counts, self.sources, size, self.data.where))
        self.make_reader = partial(BlockReader, make_reader, self.index, counts, self.sources, size, encode)
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

    def order(self, seed: int, batch_size: int) -> Callable[[], Order]:
        """Builds the order of the samples, given ``train.seed`` and ``train.batch_size``."""
        options = self.data.options
        return partial(Order, self.groups, self.weights, seed, options.lanes, options.shuffle_buffer, batch_size)

    def size(self) -> dict[str, str]:
        """The size of the training split, for the log."""
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
        order = self.order(run.recipe.train.seed, run.recipe.train.batch_size)
        return {
            **loaded,
            "train": Streamed(self.index, self.make_reader, self.sources, order, encode, self.weights is not None),
        }
