"""The dataset of a streamed split, which reads any range of positions of an epoch.

A row is a sample, or a block of tokens is (``blocks``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from fastloop_plugins.text.streaming.windows import Windows

if TYPE_CHECKING:
    from fastloop_plugins.rows.index import Index, Reader, Row, RowName
    from fastloop_plugins.rows.order import Order
    from fastloop_plugins.text.streaming.blocks import BlockReader

    Encoder = Callable[[list[Row], list[RowName]], list[dict[str, Any]]]
    """Columns and names of some rows -> their samples. A data worker calls it."""


class StreamedDataset(IterableDataset[Any]):
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
