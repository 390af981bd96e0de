"""The streamed training split of a text task: an iterable dataset that reads any range of positions of an epoch.

A row is a sample. The task reads the first rows of a fixed order into memory and checks them as the whole split of another run. The
trained tokenizer, the classes and warnings about rows follow from them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from fastloop_plugins.tasks._streaming_files import NamedPart, Reader, find_shards, read_index
from fastloop_plugins.tasks._streaming_order import Order, Place

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop_plugins.tasks._streaming_files import Index
    from fastloop_plugins.tasks._text_data import TextData

logger = logging.getLogger("fastloop")

HEAD = 4096
"""Rows in memory that stand for the training split in checks, and that a tokenizer is trained on."""
COPIES = 5
"""Rows of each label among them at most, beside the first rows: fewer would be a warning about a rare class."""

Row = tuple[Any, ...]
Encoder = Callable[[list[Row], list[str]], list[dict[str, Any]]]
"""Columns and names of some rows -> their samples. A data worker calls it."""


class Windows:
    """The rows of one reader: the current window of each lane in memory, and the position after it in the files."""

    def __init__(self, order: Order, reader: Reader, sources: Sequence[int]) -> None:
        self.order, self.reader, self.sources = order, reader, sources
        self.held: dict[tuple[int, int], tuple[Any, list[tuple[int, Row]]]] = {}
        self.cursors: dict[tuple[int, int], tuple[Any, Iterator[tuple[int, Row]]]] = {}

    def row(self, place: Place) -> tuple[int, Row]:
        """Number and columns of the row at a place. Places of a lane come in increasing order."""
        lane, window = (place.lane, place.source), (place.turn, place.start)
        held, rows = self.held.get(lane, (None, []))
        if held != window:
            self.held.pop(lane, None)
            position, cursor = self.cursors.pop(lane, (None, iter(())))
            if position != window:
                cursor = self._from(place.source, place.turn, place.start)
            rows = list(islice(cursor, place.size))
            self.held[lane] = window, rows
            self.cursors[lane] = (place.turn, place.start + place.size), cursor
        return rows[place.offset]

    def _from(self, source: int, turn: int, slot: int) -> Iterator[tuple[int, Row]]:
        """The rows of a pass over a source from a slot on."""
        groups, ends = self.order.stream(source, turn)
        index = int(np.searchsorted(ends, slot, side="right"))
        for number in range(index, len(groups)):
            group = int(groups[number]) + self.sources[source]
            first, rows = int(self.reader.index.firsts[group]), int(self.reader.index.rows[group])
            skip = max(slot - (int(ends[number]) - rows), 0)
            yield from enumerate(self.reader.read(group, skip), first + skip)


class Streamed(IterableDataset[Any]):
    """A streamed split.

    Args:
        columns: The columns of a row, as ``encode`` takes them.
        sources: The first row group of each source.
        make_order: Returns the order of the rows. Each process that reads calls it.
    """

    def __init__(
        self, index: Index, columns: Sequence[str], sources: Sequence[int], make_order: Callable[[], Order], encode: Encoder
    ) -> None:
        self.index, self.columns, self.sources = index, list(columns), list(sources)
        self.make_order, self.encode = make_order, encode
        self.size = int(index.rows.sum())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The sample of a row, which is read from its file: for checks of single samples."""
        group = self.index.group_of(row)
        with closing(Reader(self.index, self.columns)) as reader:
            values = next(reader.read(group, row - int(self.index.firsts[group])))
        return self.encode([values], [self.index.name(row)])[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The samples of the first epoch."""
        for ((_, sample),) in self.read_ranges(0, (range(position, position + 1) for position in range(self.size))):
            yield sample

    def read_ranges(self, epoch: int, ranges: Iterable[range]) -> Iterator[list[tuple[int, Any]]]:
        """See ``fastloop.data.DatasetProtocol``. Without a mix, a sample's id is its row's number, counted over all files."""
        if get_worker_info() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads did not survive the fork: it would wait for them
        order = self.make_order()
        with closing(Reader(self.index, self.columns)) as reader:
            windows = Windows(order, reader, self.sources)
            for positions in ranges:
                found = [windows.row(order.locate(epoch, position)) for position in positions]
                ids = [row for row, _ in found] if order.counts is None else list(positions)
                samples = self.encode([values for _, values in found], [self.index.name(row) for row, _ in found])
                yield list(zip(ids, samples, strict=True))

    def fingerprint(self) -> str:
        """A hash of the sizes and checksums of the files' row groups."""
        return hashlib.blake2b(json.dumps(self.index.facts).encode(), digest_size=8).hexdigest()


class Streaming:
    """``data.streaming`` of a recipe: its files, and, once opened, their index and first rows.

    Raises:
        RecipeError: A file does not exist, or cannot be streamed.
    """

    def __init__(self, data: TextData, given: str | list[str]) -> None:
        self.data = data
        self.entries = find_shards(data.recipe, given, f"{data.where}.files.train")
        if data.options.mix is None:
            self.entries = [[path for paths in self.entries for path in paths]]

    def read_head(self) -> NamedPart:
        """Index the files, and read the rows that stand for the training split.

        Raises:
            RecipeError: A file has no rows, or not the columns of the section.
        """
        data, options = self.data, self.data.options
        columns = data.text_columns()
        label = options.label if data.label_type == "class" and data.labels else None
        self.columns = [*columns, *data.labels]
        keys = columns | dict.fromkeys(data.labels, "label")
        self.index = index = read_index([path for paths in self.entries for path in paths], keys, label)  # type: ignore[arg-type]
        files = np.cumsum([0, *map(len, self.entries)])
        self.sources = np.searchsorted(index.file, files[:-1]).tolist()
        self.groups = np.split(index.rows, self.sources[1:])
        self.check_mix()
        order = self.order(0, 1)()
        with closing(Reader(index, self.columns)) as reader:
            windows = Windows(order, reader, self.sources)
            found = [windows.row(order.locate(0, position)) for position in range(min(HEAD, order.size))]
        rows, names = [values for _, values in found], [index.name(row) for row, _ in found]
        for value, (count, first) in index.labels.items():
            rows += [(*rows[0][:-1], value)] * min(count, COPIES)
            names += [index.name(first)] * min(count, COPIES)
        part = NamedPart(f"{index.paths[0]}" + f" and {len(index.paths) - 1} more" * (len(index.paths) > 1), {})
        part.columns = dict(zip(self.columns, map(list, zip(*rows, strict=True)), strict=True))
        part.names = names
        self.head = part
        return part

    def check_mix(self) -> None:
        """Raise an error for a source that is too small for the lanes."""
        from fastloop import RecipeError

        lanes = self.data.options.lanes
        for paths, rows in zip(self.entries, self.groups, strict=True):
            if self.data.options.mix is not None and rows.sum() < lanes:
                raise RecipeError(
                    f"{self.data.where}.mix: {paths[0]} has {rows.sum()} rows, and data.lanes is {lanes}. Set data.lanes to fewer."
                )

    def order(self, seed: int, batch_size: int) -> Callable[[], Order]:
        """Builds the order of the rows, given ``train.seed`` and ``train.batch_size``."""
        options = self.data.options
        return partial(Order, self.groups, options.mix, seed, options.lanes, options.shuffle_buffer, batch_size)

    def size(self) -> dict[str, str]:
        """The size of the training split, for the log."""
        index = self.index
        return {"train": f"train {int(index.rows.sum())}, streamed from {len(index.rows)} row groups in {len(index.paths)} files"}

    def datasets(self, run: Run, loaded: Mapping[str, Any], encode: Callable[[Mapping[Any, Any]], Encoder]) -> dict[str, Any]:
        """The datasets of a run: ``train`` is streamed, and the others are as ``loaded``.

        Args:
            encode: Returns the encoder, given the mapping of a label in the files to that of a sample.
        """
        labels = loaded["train"].labels
        table = {} if labels is None else dict(zip(self.head.columns[self.data.labels[0]], labels.tolist(), strict=True))
        order = self.order(run.recipe.train.seed, run.recipe.train.batch_size)
        return {**loaded, "train": Streamed(self.index, self.columns, self.sources, order, encode(table))}
