"""The plots of a sweep: the metric against each value that varies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from statistics import fmean, stdev
from typing import Any

from fastloop_tools.report.charts import FULL, Chart, Frame, Limits, Line, Mean, path, value_range
from fastloop_tools.shared.svg import number

SERIES = 6
"""Most lines in a plot. With more combinations of the other values, one line has the means over all of them."""
LABEL = 14
"""Most characters of a label."""
ALL = "all other values"
DODGE = 6
"""Distance between lines at the same value, in units of the picture."""
Results = dict[str, dict[str, list[tuple[float, str]]]]
"""Line -> value on the horizontal axis -> (metric, name of the run) of each run."""


def plots(record: Mapping[str, Any]) -> list[Chart]:
    """A plot for each key that varies. Each run is a point; means over runs have their standard deviation as a
    whisker."""
    keys = list(record["runs"][0]["values"]) if record["runs"] else []
    found = [_plot(record, key, _results(record, key)) for key in keys]
    return [chart for chart in found if chart is not None]


def _results(record: Mapping[str, Any], key: str) -> Results:
    """The finite results of finished runs, by the values of the other keys."""
    metric, found = record["monitor"].removeprefix("validation "), Results()
    for run in record["runs"]:
        value = (run["metrics"] or {}).get(metric)
        if value is None or not math.isfinite(value):
            continue
        others = " ".join(f"{name.rpartition('.')[2]}={text}" for name, text in run["values"].items() if name != key)
        found.setdefault(others, {}).setdefault(run["values"][key], []).append((value, run["name"]))
    if len(found) <= SERIES:
        return found
    pooled: dict[str, list[tuple[float, str]]] = {}
    for columns in found.values():
        for text, results in columns.items():
            pooled.setdefault(text, []).extend(results)
    return {ALL: pooled}


def _plot(record: Mapping[str, Any], key: str, found: Results) -> Chart | None:
    if not found:
        return None
    order = dict.fromkeys(run["values"][key] for run in record["runs"])
    places, across = axis(list(order), key)
    values = [value for columns in found.values() for results in columns.values() for value, _ in results]
    groups = [[value for value, _ in results] for columns in found.values() for results in columns.values()]
    edges = [fmean(group) + sign * _deviation(group) for group in groups for sign in (-1, 1)]
    margin = (max(places.values()) - min(places.values())) * 0.08 or 1
    frame = Frame(
        Limits(min(places.values()) - margin, max(places.values()) + margin, *value_range(values + edges)), FULL
    )
    lines, rows = list[Line](), list[tuple[str, ...]]()
    for index, (name, columns) in enumerate(found.items()):
        shift = (index - (len(found) - 1) / 2) * DODGE
        line = Line(name or record["monitor"], index, "", [], shown=True)
        for text in sorted(columns, key=lambda text: places[text]):
            group = [value for value, _ in columns[text]]
            for value, run in columns[text]:
                x, y = frame.place(places[text], value)
                line.dots.append((round(x + shift, 1), y, f"{run}: {number(value)}"))
            mean, deviation = fmean(group), _deviation(group)
            (x, y), top, end = (
                frame.place(places[text], value) for value in (mean, mean + deviation, mean - deviation)
            )
            spread = number(deviation) if len(group) > 1 else ""
            label = f"{key}={text}: mean {number(mean)}" + (f", deviation {spread}" if spread else "")
            line.means.append(Mean(round(x + shift, 1), y, top[1], end[1], label))
            rows.append((f"{text}, {name}" if name else text, str(len(group)), number(mean), spread))
        line.path = path([(mean.x, mean.y) for mean in line.means]) if len(line.means) > 1 else ""
        lines.append(line)
    ordered = sorted(order, key=lambda text: places[text])
    labels = [text if len(text) <= LABEL else f"{text[: LABEL - 1]}…" for text in ordered]
    xs = frame.horizontal([places[text] for text in ordered], labels)
    heads = (key.rpartition(".")[2], "runs", "mean", "deviation")
    return Chart(
        f"{record['monitor']} by {key}", record["monitor"], across, lines, xs, frame.vertical(), heads, rows, frame.left
    )


def _deviation(group: Sequence[float]) -> float:
    return stdev(group) if len(group) > 1 else 0.0


def axis(texts: Sequence[str], key: str) -> tuple[dict[str, float], str]:
    """The place of each value, and the name of the axis. Numbers are in order, on a logarithmic axis if they span a
    factor of 10 or more. Other values are evenly spaced."""
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        numbers = {}
    if not numbers or not all(map(math.isfinite, numbers.values())) or len(set(numbers.values())) < len(texts):
        return {text: float(index) for index, text in enumerate(texts)}, key
    low, high = (pick(numbers, key=numbers.__getitem__) for pick in (min, max))
    if numbers[low] > 0 and Decimal(high) >= 10 * Decimal(low):  # as floats, 9e-4 is less than 10 * 9e-5
        return {text: math.log10(value) for text, value in numbers.items()}, f"{key}, logarithmic"
    return numbers, key
