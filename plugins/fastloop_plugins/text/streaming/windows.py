"""The rows of a stream that a reader holds in memory: a window for each lane, among whose rows places are drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from fastloop_plugins.rows.index import Reader
from fastloop_plugins.rows.order import Order, Place

if TYPE_CHECKING:
    from fastloop_plugins.rows.index import Row
    from fastloop_plugins.text.streaming.blocks import BlockReader

    Lane = tuple[int, int]
    """Lane and source: a lane reads each source with a window of its own."""


@dataclass(frozen=True)
class SlotPlace:
    """The place of a slot in a pass over a source.

    Attributes:
        group: Its row group, by the place in the pass.
        skip: Rows of the group that are before it.
    """

    group: int
    skip: int


@dataclass(frozen=True)
class LaneWindow:
    """Rows of a lane in memory, among which places are drawn.

    Attributes:
        turn: The pass over the source.
        start: Its first slot in that pass.
        rows: Number and columns of each row.
    """

    turn: int
    start: int
    rows: list[tuple[int, Row]]


@dataclass(frozen=True)
class LaneCursor:
    """The rows of a pass that a lane has not read yet.

    Attributes:
        turn: The pass over the source.
        slot: The slot of the next one.
        rows: They begin with that slot.
    """

    turn: int
    slot: int
    rows: Iterator[tuple[int, Row]]


class Windows:
    """The rows of one reader: the current window of each lane in memory, and the position after it in the files."""

    def __init__(self, order: Order, reader: Reader | BlockReader, sources: Sequence[int]) -> None:
        self.order = order
        self.reader = reader
        self.sources = sources
        self.held: dict[Lane, LaneWindow] = {}
        self.cursors: dict[Lane, LaneCursor] = {}

    def row(self, place: Place) -> tuple[int, Row]:
        """Number and columns of the row at a place. Places of a lane come in increasing order."""
        lane = (place.lane, place.source)
        window = self.held.get(lane)
        if window is None or (window.turn, window.start) != (place.turn, place.start):
            self.held.pop(lane, None)
            window = self._read_window(lane, place)
            self.held[lane] = window
        return window.rows[place.offset]

    def _read_window(self, lane: Lane, place: Place) -> LaneWindow:
        """Read the window of a place, from where the last one of its lane ended if that is not far."""
        start = self._find(place.source, place.turn, place.start)
        cursor = self.cursors.pop(lane, None)
        if cursor is not None and cursor.turn == place.turn and 0 <= place.start - cursor.slot <= start.skip:
            # the cursor reads the same row group: skip its rows before the window
            deque(islice(cursor.rows, place.start - cursor.slot), maxlen=0)
            rows = cursor.rows
        else:
            rows = self._from(place.source, place.turn, start)
        window = LaneWindow(place.turn, place.start, list(islice(rows, place.size)))
        self.cursors[lane] = LaneCursor(place.turn, place.start + place.size, rows)
        return window

    def _find(self, source: int, turn: int, slot: int) -> SlotPlace:
        """The place of a slot in a pass over a source.

        With row groups that end at [4, 8, 12], slot 6 is in the second one, after 2 of its rows.
        """
        _, ends = self.order.group_order(source, turn)
        place = int(np.searchsorted(ends, slot, side="right"))
        first = int(ends[place - 1]) if place else 0
        return SlotPlace(place, slot - first)

    def _from(self, source: int, turn: int, start: SlotPlace) -> Iterator[tuple[int, Row]]:
        """Yield the rows of a pass over a source, from a place on."""
        skip = start.skip
        groups, _ = self.order.group_order(source, turn)
        for number in groups[start.group :]:
            group = int(number) + self.sources[source]
            first = int(self.reader.index.firsts[group]) + skip
            yield from enumerate(self.reader.read(group, skip), first)
            skip = 0
