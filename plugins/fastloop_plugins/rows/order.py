"""The order of streamed rows as a function of seed, epoch and position.

Nothing has to be saved or repeated to resume in it.

An epoch shuffles the row groups and puts their rows end to end. This sequence is cut into ``lanes`` equal parts, which
are read side by side. Each lane shuffles its rows in windows, which all lanes together hold in memory. Blocks of
consecutive positions take turns on the lanes. So a process or worker reads only the lanes of its own micro-batches, and
any number of them gives the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CYCLE = 1000
"""Samples of a lane after which the sources of a mix have their exact shares: weights count in thousandths."""
WORKERS = 2
"""Data workers of a process that have lanes of their own, up to ``lanes / WORKERS`` processes. A step reads from
``lanes / WORKERS`` lanes, so a larger number would mix rows of fewer lanes in a step."""


class Place(NamedTuple):
    """Where a sample is: in a pass over a source, in a window of slots that one lane reads.

    Attributes:
        lane: The part of the pass, from 0. Without weights, ``lanes`` is that of the rows that remain.
        source: Index of the source.
        turn: The pass over the source, from 0; without weights, the epoch.
        start: The first slot of the window. A slot is a row of the pass, whose row groups are put end to end.
        size: Slots of the window.
        offset: The slot of the sample in the window, from 0.
    """

    lane: int
    source: int
    turn: int
    start: int
    size: int
    offset: int


class Order:
    """The order of the rows of one or several sources.

    Args:
        groups: Rows of every row group, one array (row groups,) a source.
        weights: Share of each source; None: one source, whose rows come once an epoch each.
        seed: The seed of all random numbers of the order.
        lanes: Equal parts of an epoch that are read side by side.
        buffer: Rows of the windows of all lanes together; 0: no shuffling, and a single lane.
        batch_size: Samples of an optimizer step.

    Attributes:
        size: Samples of an epoch: the rows of all sources.
        block: Consecutive positions of one lane. Up to ``lanes / WORKERS`` processes have lanes of their own.
        window: Slots of a window of one source in one lane.
        rounds: Blocks of each lane in an epoch, without weights.
        counts: Samples of each source in a cycle of ``CYCLE`` samples; None: without weights.
    """

    def __init__(
        self,
        groups: Sequence[NDArray[np.int64]],
        weights: Sequence[float] | None,
        seed: int,
        lanes: int,
        buffer: int,
        batch_size: int,
    ) -> None:
        self.groups = groups
        self.seed = seed
        self.shuffles = buffer > 0
        self.lanes = lanes if buffer else 1
        self.rows = [int(rows.sum()) for rows in groups]
        self.size = sum(self.rows)
        self.block = max(1, batch_size * WORKERS // self.lanes)
        self.window = max(1, (buffer or batch_size) // (self.lanes * len(groups)))
        self.rounds = self.size // (self.lanes * self.block)
        self.counts = None if weights is None else count_samples(weights)
        # the methods of the same names with caches: of the current window of each lane, of two passes, of each lane
        self.permutation = lru_cache(self.lanes * len(groups) + 1)(self._permutation)
        self.group_order = lru_cache(2 * len(groups))(self._group_order)
        self.pattern = lru_cache(self.lanes)(self._pattern)

    def locate(self, epoch: int, position: int) -> Place:
        """The place of a position of an epoch."""
        if self.counts is not None:
            lane, index = self._lane(epoch * self.size + position)
            source, index = self._source(lane, index)
            # of 10 rows and 3 lanes, lane 1 has the rows 3 to 5
            first = self.rows[source] * lane // self.lanes
            last = self.rows[source] * (lane + 1) // self.lanes
            turn, index = divmod(index, last - first)
            return self._place(lane, source, turn=turn, first=first, length=last - first, index=index)
        # Without weights, each lane has whole blocks, and the rows that remain are a lane of their own. 10 rows with 2
        # lanes and blocks of 2: lane 0 has the rows 0 to 3, lane 1 the rows 4 to 7, and rows 8 and 9 remain.
        per_lane = self.rounds * self.block
        if position < self.lanes * per_lane:
            lane, index = self._lane(position)
            return self._place(lane, source=0, turn=epoch, first=lane * per_lane, length=per_lane, index=index)
        remaining = self.lanes * per_lane
        return self._place(
            self.lanes, source=0, turn=epoch, first=remaining, length=self.size - remaining, index=position - remaining
        )

    def _lane(self, position: int) -> tuple[int, int]:
        """The lane of a position, and the position in it.

        With blocks of 2 positions and 3 lanes, positions 0 to 7 are in the lanes [0 0 1 1 2 2 0 0], at the places
        [0 1 0 1 0 1 2 3].
        """
        block, rest = divmod(position, self.block)
        return block % self.lanes, block // self.lanes * self.block + rest

    def _source(self, lane: int, index: int) -> tuple[int, int]:
        """The source of a lane's sample, and its index among the lane's samples of that source."""
        cycle, rest = divmod(index, CYCLE)
        assert self.counts is not None
        pattern, before = self.pattern(lane)
        source = int(pattern[rest])
        return source, cycle * int(self.counts[source]) + int(before[rest])

    def _pattern(self, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample of a cycle, and the number of earlier samples of the same source.

        For the pattern [1 0 1 1], these numbers are [0 0 1 2].
        """
        pattern = np.random.default_rng([self.seed, lane]).permutation(
            np.repeat(np.arange(len(self.groups)), np.array(self.counts))
        )
        before = np.empty(CYCLE, np.int64)
        for source in range(len(self.groups)):
            (places,) = np.nonzero(pattern == source)
            before[places] = np.arange(len(places))
        return pattern, before

    def _place(self, lane: int, source: int, *, turn: int, first: int, length: int, index: int) -> Place:
        """The place of sample ``index`` among ``length`` slots that begin with slot ``first``.

        Windows of 4 slots divide 10 slots into [0 1 2 3 | 4 5 6 7 | 8 9]. Sample 6 is the third one of window 1, which
        has the slots 4 to 7 in an order of its own.
        """
        number, index = divmod(index, self.window)
        start = number * self.window
        size = min(self.window, length - start)
        offset = int(self.permutation(lane, source, turn, number, size)[index])
        return Place(lane, source, turn, first + start, size, offset)

    def _permutation(self, lane: int, source: int, turn: int, number: int, count: int) -> NDArray[np.int64]:
        """The order of the ``count`` slots of window ``number`` of a lane."""
        if not self.shuffles:
            return np.arange(count)
        return np.random.default_rng([self.seed, turn, source, lane, number]).permutation(count)

    def _group_order(self, source: int, turn: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row groups of a pass over a source in their order, and the slot at which each ends."""
        order = np.arange(len(self.groups[source]))
        if self.shuffles:
            order = np.random.default_rng([self.seed, turn, source]).permutation(len(order))
        return order, np.cumsum(self.groups[source][order])


def count_samples(weights: Sequence[float]) -> NDArray[np.int64]:
    """Samples of each source in a cycle, by largest remainders.

    The weights [1, 2] have the shares [333.3, 666.7] of 1000 samples. Rounded down, [333, 666], one sample is missing:
    the source with the largest remainder gets it, [333, 667].
    """
    shares = np.array(weights, float) / sum(weights) * CYCLE
    counts = np.floor(shares).astype(np.int64)
    missing = CYCLE - counts.sum()
    by_remainder = np.argsort(counts - shares, kind="stable")  # the largest one first
    counts[by_remainder[:missing]] += 1
    return counts
