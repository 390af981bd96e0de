"""Reads and checks JSON files of runs, sweeps and evaluations. An error names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError

NUMBERS = (
    *("steps", "peak_memory_bytes", "samples_per_second", "tokens_per_second"),
    *(f"{part}_seconds" for part in ("train", "evaluate", "save", "startup", "compile")),
)
"""Keys of a summary that the page shows as numbers."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError)
"""Errors of reading a value from a record of another form."""


@dataclass
class Class:
    """The metrics of one class in an evaluation."""

    name: str
    precision: float
    recall: float
    f1: float
    samples: int


@dataclass
class WorstSample:
    """A sample that the model got wrong. ``input`` is None if it has no text."""

    index: int
    target: str
    prediction: str
    target_probability: float
    prediction_probability: float
    input: str | None


@dataclass
class Evaluation:
    """A result of ``fastloop evaluate``.

    Attributes:
        data: The split or file.
        settings: The recipe and overrides of the command.
        steps: Optimizer steps of the evaluated run; None: unknown.
        confusion: Counts, target by prediction; empty without classes.
    """

    data: str
    settings: str
    steps: int | None
    metrics: dict[str, float]
    classes: list[Class]
    confusion: list[list[int]]
    worst: list[WorstSample]

    @property
    def samples(self) -> int:
        """The number of samples of all classes."""
        return sum(row.samples for row in self.classes)


def read_evaluation(path: Path) -> Evaluation:
    """Read a result of ``fastloop evaluate``.

    Raises:
        UsageError: The file cannot be read, or has another form.
    """
    record = read_json(path)
    try:
        classes = [
            Class(
                str(row["name"]), float(row["precision"]), float(row["recall"]), float(row["f1"]), int(row["samples"])
            )
            for row in record["classes"]
        ]
        worst = [
            WorstSample(
                int(row["index"]),
                str(row["target"]),
                str(row["prediction"]),
                float(row["target_probability"]),
                float(row["prediction_probability"]),
                None if row["input"] is None else str(row["input"]),
            )
            for row in record.get("worst") or ()
        ]
        found: Evaluation | None = Evaluation(
            str(record["file"] or record["split"]),
            " ".join(map(str, record.get("arguments") or ())),
            None if record.get("steps") is None else int(record["steps"]),
            {str(name): float(value) for name, value in record["metrics"].items()},
            classes,
            [[int(count) for count in row] for row in record["confusion"]],
            worst,
        )
    except MALFORMED:
        found = None
    if found is None or {len(found.confusion), *map(len, found.confusion)} - {len(found.classes)}:
        raise UsageError(
            f"{path}: expected the results that `fastloop evaluate` writes. Evaluate the run again, or remove the file."
        )
    return found


def check_sweep(sweep: Mapping[str, Any], path: Path) -> None:
    """Check the types of the values that the page shows of a sweep.

    Raises:
        UsageError: The record has another form than `fastloop sweep` writes.
    """
    try:
        numbers = [point[key] for point in sweep["points"] for key in ("mean", "deviation") if point[key] is not None]
        numbers += [
            value
            for point in sweep["points"]
            if point["difference"]
            for value in point["difference"].values()
            if value is not None
        ]
        numbers += [value for run in sweep["runs"] for value in (run["metrics"] or {}).values()]
        texts = [
            sweep["monitor"],
            *(point["point"] for point in sweep["points"]),
            *(run["name"] for run in sweep["runs"]),
        ]
        texts += [value for run in sweep["runs"] for value in run["values"].values()]
        if (
            all(map(is_number, numbers))
            and all(isinstance(text, str) for text in texts)
            and all(run["values"].keys() == sweep["runs"][0]["values"].keys() for run in sweep["runs"])
            # folders of the sweep
            and all(Path(run["name"]).name == run["name"] not in ("", "..") for run in sweep["runs"])
            and all(isinstance(point["runs"], list) and isinstance(point["finished"], int) for point in sweep["points"])
        ):
            return
    except MALFORMED:
        pass
    raise UsageError(f"{path}: expected the runs and points that `fastloop sweep` writes.")


def check_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Check the types of the values that the page shows of a summary.

    Raises:
        UsageError: One has another type.
    """
    numbers = {
        key: value for split in ("validation", "test") for key, value in _mapping(summary.get(split), path).items()
    }
    numbers |= {key: summary.get(key) for key in NUMBERS}
    wrong = [
        f"{key}: found {value!r:.60}, expected a number"
        for key, value in numbers.items()
        if value is not None and not is_number(value)
    ]
    if not isinstance(summary.get("plugins") or [], list):
        wrong.append("plugins: expected a list")
    if wrong:
        raise UsageError(f"{path}: {wrong[0]}.")


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise UsageError(f"{path}: found {value!r:.60}, expected metrics and their values.")
    return value or {}


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UsageError: The file cannot be read, or holds another value.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected one JSON object.")
    return found
