"""``bench.png``: the speed of each variant, with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the chart.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rows = [row for row in record["variants"] if row["kind"] != "without" and row["results"]]
    if not rows:
        return
    unit = rows[0]["results"]["unit"]
    speeds = [row["results"][f"{unit}_per_second"] for row in rows]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colours = []
    for row in rows:
        over = row["results"]["over_before"]
        colours.append({"faster": "#2a7f62", "slower": "#b5493a"}.get(over["verdict"] if over else "", "#8a8f98"))
    middle = [speed["median"] for speed in speeds]
    error = [[speed["median"] - speed["low"] for speed in speeds], [speed["high"] - speed["median"] for speed in speeds]]
    bars = axes.barh(range(len(rows)), middle, xerr=error, color=colours, capsize=3)
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axes.invert_yaxis()
    factors = [row["results"]["over_baseline"] for row in rows]
    axes.bar_label(bars, [f" {over['median']:.2f}x" if over else "" for over in factors], padding=6)
    axes.margins(x=0.15)
    axes.set_xlabel("real tokens/s" if unit == "tokens" else "samples/s")
    axes.set_title(f"{record['name']} on {record['machine']['device']}: green is a claimed win over the variant before")
    axes.spines[["top", "right"]].set_visible(False)
    aside = path.with_name(f".{path.name}.partial")
    figure.savefig(aside, format="png", dpi=150)
    aside.rename(path)
