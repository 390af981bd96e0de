"""Reads ``metrics.jsonl``, and later only the lines that were added."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.errors import UsageError
from fastloop_tools.report.records import is_number
from fastloop_tools.report.series import Points, Series

if TYPE_CHECKING:
    import numpy as np

BLOCK = 2**23
"""Bytes that are read at once."""
LARGE = 2**20
"""Bytes from which pyarrow reads lines, at about 5 times the speed of ``json``. Its import takes 0.1 s."""
TAIL = 4096
"""Bytes before the end of what was read. If they have changed, the run has begun or resumed again, and the file is read
from its start."""


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
                while data := file.read(BLOCK) + file.readline():
                    whole = data.rfind(b"\n") + 1
                    self._add(data[:whole])  # no copy of bytes that are complete
                    if whole < len(data):
                        self._add(data[whole:])
                        break
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error}.") from None
        return self.lines

    def _add(self, data: bytes) -> None:
        """Add the values of lines; nothing for a line that is not complete."""
        count = data.count(b"\n")
        columns = read_columns(data, count) if len(data) >= LARGE else None
        found: Mapping[str, Points | np.ndarray] = self._parse(data) if columns is None else columns
        for key, added in found.items():
            self.lines.setdefault(key, Series()).extend(added)
        if found or data.endswith(b"\n"):
            self._offset += len(data)
            self._number += count
            self._tail = (self._tail + data)[-TAIL:]

    def _parse(self, data: bytes) -> dict[str, Points]:
        """The points of each value, line by line."""
        points: dict[str, Points] = {}
        for number, line in enumerate(io.BytesIO(data), start=self._number + 1):
            try:
                point = json.loads(line.decode())
                step, split = int(point.pop("step")), point.pop("split", None)
                values = [(key, float(value)) for key, value in point.items() if is_number(value)]
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                if not line.endswith(b"\n"):
                    break
                self._begin()
                raise UsageError(
                    f"{self.path}, line {number}: expected one JSON object with a step, and numbers."
                ) from None
            for key, value in values:
                points.setdefault(f"{split} {key}" if split else key, []).append((step, value))
        return points


def read_columns(data: bytes, count: int) -> dict[str, np.ndarray] | None:
    """The points of each value as arrays of shape (points, 2), by pyarrow's parser.

    Args:
        data: Complete lines, ``count`` of them.

    Returns:
        None if the lines are not as fastloop writes them: read them one by one, which names the line that is wrong.
    """
    import numpy as np
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import compute, json

    schema = pyarrow.schema({"step": pyarrow.int64(), "split": pyarrow.string()})
    try:
        table = json.read_json(
            pyarrow.BufferReader(data), json.ReadOptions(block_size=2**20), json.ParseOptions(explicit_schema=schema)
        )
    except (pyarrow.ArrowInvalid, UnicodeDecodeError):
        return None
    steps, splits = table["step"], table["split"]
    if steps.null_count or len(table) != count:
        return None
    points: dict[str, np.ndarray] = {}
    for split in compute.unique(splits).to_pylist():
        rows = table.filter(compute.is_null(splits) if split is None else compute.equal(splits, split))
        for key in rows.column_names:
            if key in schema.names or rows[key].type not in (pyarrow.int64(), pyarrow.float64()):
                continue
            there = rows.select(["step", key])
            if there[key].null_count:
                there = there.drop_null()
            if len(there):  # to_numpy would import pandas
                pair = [np.from_dlpack(column.combine_chunks()) for column in there.columns]
                points[f"{split} {key}" if split else key] = np.column_stack(pair).astype(np.float64, copy=False)
    return points
