"""Reads ``metrics.jsonl`` into series of bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import UsageError
from fastloop.problem import clause
from fastloop_tools.shared.json_files import MALFORMED

if TYPE_CHECKING:  # `fastloop --help` does not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

Points = list[tuple[float, float]]
"""(step, value) of each point."""
MOST = 300
"""Most points that a series keeps: a line of about one point for each of its pixels on the page."""
BLOCK = 2**22
"""Bytes that are read at once."""


def _no_groups() -> NDArray[np.float64]:
    import numpy as np

    return np.empty((0, 3))


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
    _groups: NDArray[np.float64] = field(default_factory=_no_groups)
    """The last step, the sum and the number of neighbours, (groups, 3); all groups but the last have ``_size``."""
    _size: int = 1

    def __bool__(self) -> bool:
        return bool(len(self._groups))

    @property
    def points(self) -> Points:
        """The points to draw: the mean of neighbours, at the step of the last one."""
        return [(step, total / count) for step, total, count in self._groups.tolist()]

    def extend(self, points: Sequence[tuple[float, float]] | NDArray[np.float64]) -> Series:
        """Add points, (points, 2), and return the series."""
        import numpy as np

        added = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        added = added[np.isfinite(added[:, 1])]
        if not len(added):
            return self
        if not self:
            self.start, self.first = added[0].tolist()
        values = added[:, 1]
        self.last = float(values[-1])
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        new_groups = np.insert(added, 2, 1, axis=1)  # each point is a group of one
        self._merge(np.concatenate([self._groups, new_groups]))
        return self

    def _merge(self, groups: NDArray[np.float64]) -> None:
        """Merge neighbours, (groups, 3), into groups of ``_size`` points, which doubles until they are at most
        ``MOST``.

        An example with ``_size`` 4 once it has doubled::

            counts        2  2  1  1
            ends          2  4  5  6    points up to the end of each group
            first_points  0  2  4  5    index of the first point of each group
            new_group     0  0  1  1    the group that holds that point
            starts        0     2       groups with which a new group begins
            lasts            1     3
            counts        4     2
        """
        import numpy as np

        counts = groups[:, 2]
        ends = counts.cumsum()
        while ends[-1] > MOST * self._size:
            self._size *= 2
        first_points = ends - counts
        new_group = first_points // self._size
        starts = np.flatnonzero(np.diff(new_group, prepend=-1))
        lasts = np.append(starts[1:], len(groups)) - 1
        last_steps = groups[lasts, 0]
        sums_and_counts = np.add.reduceat(groups[:, 1:], starts)
        self._groups = np.column_stack([last_steps, sums_and_counts])

    def scaled(self, factor: float) -> Series:
        """The series in another unit."""
        first, last, least, most = (value * factor for value in (self.first, self.last, self.least, self.most))
        return Series(self.start, first, last, least, most, self._groups * (1.0, factor, 1.0), self._size)


def read_log(path: Path) -> dict[str, Series]:
    """Value -> its series, of a log. A last line that is not complete is ignored: the run is writing it, or was killed
    then.

    Raises:
        UsageError: The file cannot be read; names the line.
    """
    series: dict[str, Series] = {}
    number = 0
    try:
        with path.open("rb") as file:
            while True:
                data = file.read(BLOCK) + file.readline()
                if not data:
                    break
                whole = data[: data.rfind(b"\n") + 1]
                for part in filter(None, (whole, data[len(whole) :])):
                    for name, points in _parse(part, path, number).items():
                        series.setdefault(name, Series()).extend(points)
                number += data.count(b"\n")
    except OSError as error:
        raise UsageError(f"cannot be read: {clause(error)}.", code="file-unreadable", place=str(path)) from None
    return series


def _parse(data: bytes, path: Path, before: int) -> dict[str, NDArray[np.float64]]:
    """The points of lines; none for a line that is not complete.

    Args:
        before: Number of lines before them.
    """
    from pydantic_core import from_json  # parses in less than half the time of `json`

    count = data.count(b"\n")
    try:
        rows = from_json(b"[%b]" % data.removesuffix(b"\n").replace(b"\n", b","), cache_strings="keys")
        if len(rows) != (count or 1):
            raise ValueError("a row that is not a line")
        return read_points(rows)
    except MALFORMED:
        if not count:
            return {}
        number = before + 1 + find_malformed(data)
        raise UsageError(
            code="wrong-format", place=f"{path}, line {number}", expected="one JSON object with a step, and numbers"
        ) from None


def read_points(rows: list[dict[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Value -> its points, (points, 2), of the lines of a log. Values that are no numbers have none."""
    import numpy as np

    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}  # lines of one split with the same keys
    for row in rows:
        alike.setdefault((row.get("split"), *row), []).append(row)
    points_of: dict[str, list[NDArray[np.float64]]] = {}
    for (split, *keys), group in alike.items():
        steps = np.array([int(row["step"]) for row in group])
        for key in dict.fromkeys(keys):  # in the order of the log, as on every page of these runs
            if key == "step":
                continue
            values = [row[key] for row in group]
            kinds = [*map(type, values)]
            number_types = {int, float}.intersection(kinds)
            if not number_types:
                continue
            where = steps
            if number_types != set(kinds):
                is_number = np.array([kind in number_types for kind in kinds])
                where = steps[is_number]
                values = [*compress(values, is_number)]
            name = f"{split} {key}" if split else key
            points_of.setdefault(name, []).append(np.column_stack([where, np.array(values, dtype=np.float64)]))
    return {name: np.concatenate(parts) for name, parts in points_of.items()}


def find_malformed(data: bytes) -> int:
    """The index of the first line that is not one of a log."""
    from pydantic_core import from_json

    lines = data.splitlines()
    for index, line in enumerate(lines):
        try:
            read_points([from_json(line)])
        except MALFORMED:
            return index
    return len(lines) - 1
