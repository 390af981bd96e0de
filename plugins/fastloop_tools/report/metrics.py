"""Reads ``metrics.jsonl``, and later only the lines that were added."""

from __future__ import annotations

import json
from pathlib import Path

from fastloop.errors import UsageError
from fastloop_tools.report.series import Series

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
            self.lines.setdefault(f"{split} {key}" if split else key, Series()).extend([(step, value)])
        self._offset, self._number, self._tail = self._offset + len(line), self._number + 1, (self._tail + line)[-TAIL:]
