"""The plots of a sweep: the metric against each value that varies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import fmean, stdev
from typing import Any

from fastloop_tools.report.charts import FULL, Chart, Frame, Limits, Line, MeanMark, path, value_range
from fastloop_tools.shared.svg import number

SERIES = 6
"""Most lines in a plot. With more combinations of the other values, one line has the means over all of them."""
LABEL = 14
"""Most characters of a label."""
ALL = "all other values"
DODGE = 6
"""Distance between lines at the same value, in units of the picture."""


@dataclass(frozen=True)
class RunResult:
    """The metric of a finished run, and the name of the run."""

    value: float
    run: str


Results = dict[str, dict[str, list[RunResult]]]
"""Line -> value on the horizontal axis -> the results of its runs."""


@dataclass(frozen=True)
class MeanOfRuns:
    """The results of the runs at one place of a line: their mean, and their standard deviation (0 for one run)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, results: Sequence[RunResult]) -> MeanOfRuns:
        """The group of one or more runs."""
        values = [result.value for result in results]
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0)


def plots(record: Mapping[str, Any]) -> list[Chart]:
    """A plot for each key that varies. Each run is a point; means over runs have their standard deviation as a
    whisker."""
    if not record["runs"]:
        return []
    charts = []
    for key in record["runs"][0]["values"]:
        results = _results(record, key)
        if results:
            charts.append(_plot(record, key, results))
    return charts


def _results(record: Mapping[str, Any], key: str) -> Results:
    """The finite results of finished runs. Each combination of values of the other keys is a line."""
    metric = record["monitor"].removeprefix("validation ")
    lines: Results = {}
    for run in record["runs"]:
        value = (run["metrics"] or {}).get(metric)
        if value is None or not math.isfinite(value):
            continue
        others = [f"{name.rpartition('.')[2]}={text}" for name, text in run["values"].items() if name != key]
        columns = lines.setdefault(" ".join(others), {})
        columns.setdefault(run["values"][key], []).append(RunResult(value, run["name"]))
    if len(lines) <= SERIES:
        return lines
    pooled: dict[str, list[RunResult]] = {}
    for columns in lines.values():
        for text, results in columns.items():
            pooled.setdefault(text, []).extend(results)
    return {ALL: pooled}


def _plot(record: Mapping[str, Any], key: str, results: Results) -> Chart:
    """The plot of the metric against one key."""
    texts = list(dict.fromkeys(run["values"][key] for run in record["runs"]))
    places, across = axis(texts, key)
    frame = _frame(places, results)
    lines: list[Line] = []
    rows: list[tuple[str, ...]] = []
    for index, (name, columns) in enumerate(results.items()):
        line = Line(name or record["monitor"], index, "", [], shown=True)
        shift = (index - (len(results) - 1) / 2) * DODGE  # of three lines: one step left, none, and one step right
        for text in sorted(columns, key=places.__getitem__):
            group = MeanOfRuns.of(columns[text])
            for result in columns[text]:
                x, y = frame.place(places[text], result.value)
                line.dots.append((round(x + shift, 1), y, f"{result.run}: {number(result.value)}"))
            spread = number(group.deviation) if len(columns[text]) > 1 else ""
            line.means.append(_mean(frame, places[text], shift, group, f"{key}={text}", spread))
            rows.append((f"{text}, {name}" if name else text, str(len(columns[text])), number(group.mean), spread))
        if len(line.means) > 1:
            line.path = path([(mean.x, mean.y) for mean in line.means])
        lines.append(line)
    ordered = sorted(texts, key=places.__getitem__)
    labels = [text if len(text) <= LABEL else f"{text[: LABEL - 1]}…" for text in ordered]
    xs = frame.horizontal([places[text] for text in ordered], labels)
    heads = (key.rpartition(".")[2], "runs", "mean", "deviation")
    return Chart(
        f"{record['monitor']} by {key}", record["monitor"], across, lines, xs, frame.vertical(), heads, rows, frame.left
    )


def _frame(places: Mapping[str, float], results: Results) -> Frame:
    """The axes: they show every run, and the whole whisker of every mean."""
    heights = []
    for columns in results.values():
        for group_results in columns.values():
            group = MeanOfRuns.of(group_results)
            heights += [result.value for result in group_results]
            heights += [group.mean - group.deviation, group.mean + group.deviation]
    left = min(places.values())
    right = max(places.values())
    margin = (right - left) * 0.08 or 1
    low, high = value_range(heights)
    return Frame(Limits(left - margin, right + margin, low, high), FULL)


def _mean(frame: Frame, place: float, shift: float, group: MeanOfRuns, value: str, spread: str) -> MeanMark:
    """The mean of a group, and its whisker.

    Args:
        place: Its place on the horizontal axis.
        shift: Units of the picture by which its line is moved.
        value: The key and its value, for the label.
        spread: The deviation as text; empty: there is one run.
    """
    x, y = frame.place(place, group.mean)
    _, top = frame.place(place, group.mean + group.deviation)
    _, end = frame.place(place, group.mean - group.deviation)
    label = f"{value}: mean {number(group.mean)}"
    if spread:
        label += f", deviation {spread}"
    return MeanMark(round(x + shift, 1), y, top, end, label)


def axis(texts: Sequence[str], key: str) -> tuple[dict[str, float], str]:
    """The place of each value, and the name of the axis. Numbers are in order, on a logarithmic axis if they span a
    factor of 10 or more. Other values are evenly spaced."""
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        numbers = {}
    are_finite = all(math.isfinite(value) for value in numbers.values())
    are_different = len(set(numbers.values())) == len(texts)
    if not numbers or not are_finite or not are_different:
        return {text: float(index) for index, text in enumerate(texts)}, key
    low = min(numbers, key=numbers.__getitem__)
    high = max(numbers, key=numbers.__getitem__)
    if numbers[low] > 0 and Decimal(high) >= 10 * Decimal(low):  # as floats, 9e-4 is less than 10 * 9e-5
        return {text: math.log10(value) for text, value in numbers.items()}, f"{key}, logarithmic"
    return numbers, key
