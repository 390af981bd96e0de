"""Reads ``metrics.jsonl``, and later only the lines that were added, into series of bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fastloop.errors import UsageError

Points = list[tuple[float, float]]
"""(step, value) of each point."""
MOST = 300
"""Most points that a series keeps: a line of about one point for each of its pixels on the page."""
TAIL = 4096
"""Bytes before the end of what was read. If they have changed, the run has begun or resumed again, and the file is read
from its start."""


@dataclass(eq=False)
class Series:
    """A value over steps. Of more than ``MOST`` points it keeps means of neighbours. Ignores NaN and infinity.

    Attributes:
        start: The first step. This and the values below are exact.
        first, last: The first value and the last one.
        least, most: The smallest value and the largest one.
    """

    start: float = 0.0
    first: float = math.nan
    last: float = math.nan
    least: float = math.inf
    most: float = -math.inf
    _groups: list[list[float]] = field(default_factory=list)
    """The last step, the sum and the number of neighbours; all but the last have ``_size``."""
    _size: int = 1

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def points(self) -> Points:
        """The points to draw: the mean of neighbours, at the step of the last one."""
        return [(step, total / count) for step, total, count in self._groups]

    def add(self, step: float, value: float) -> None:
        """Add a point."""
        groups = self._groups
        if not math.isfinite(value):
            return
        if not groups:
            self.start, self.first = step, value
        self.last = value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value
        if groups and groups[-1][2] < self._size:
            group = groups[-1]
            group[0], group[1], group[2] = step, group[1] + value, group[2] + 1
            return
        groups.append([step, value, 1])
        if len(groups) > MOST:
            pairs = [groups[at : at + 2] for at in range(0, len(groups), 2)]
            self._groups = [[pair[-1][0], sum(one[1] for one in pair), sum(one[2] for one in pair)] for pair in pairs]
            self._size *= 2

    def extend(self, points: Iterable[tuple[float, float]]) -> Series:
        """Add points, and return the series."""
        for step, value in points:
            self.add(step, value)
        return self

    def scaled(self, factor: float) -> Series:
        """The series in another unit."""
        groups = [[step, total * factor, count] for step, total, count in self._groups]
        first, last, least, most = (value * factor for value in (self.first, self.last, self.least, self.most))
        return Series(self.start, first, last, least, most, groups, self._size)


class Metrics:
    """The values of a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.lines: dict[str, Series] = {}
        self._offset, self._number, self._tail = 0, 0, b""

    def update(self) -> dict[str, Series]:
        """Read the lines that were added, and return value -> its series.

        A last line that is not complete is ignored: the run is writing it, or was killed then.

        Raises:
            UsageError: The file cannot be read; names the line.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail or not self._tail.endswith(b"\n"):
                    self._begin()
                    file.seek(0)
                for line in file:
                    self._add(line)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error}.") from None
        return self.lines

    def _add(self, line: bytes) -> None:
        """Add the values of a line; nothing for one that is not complete."""
        try:
            point = json.loads(line.decode())
            step, split = int(point.pop("step")), point.pop("split", None)
            values = [(key, float(value)) for key, value in point.items() if type(value) in (int, float)]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            if not line.endswith(b"\n"):
                return
            number = self._number + 1
            self._begin()
            raise UsageError(
                f"{self.path}, line {number}: expected one JSON object with a step, and numbers."
            ) from None
        for key, value in values:
            name = f"{split} {key}" if split else key
            if name not in self.lines:
                self.lines[name] = Series()
            self.lines[name].add(step, value)
        self._offset, self._number, self._tail = self._offset + len(line), self._number + 1, (self._tail + line)[-TAIL:]
