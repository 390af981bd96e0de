"""Compares the points of trials: mean and deviation over seeds and folds, and paired differences to the best point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from fastloop_tools.trials.runs import TrialRun
from fastloop_tools.trials.statistics import mean_interval


def compare(runs: Sequence[TrialRun], monitor: str, minimise: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The results of each point, and the name of the best point.

    The best point has the best mean of the points whose runs have all finished with a finite value; None: there is no
    such point. ``difference`` is a point's value minus the best point's for the same seed and fold. Its 95% interval
    needs two pairs. The training sets of folds overlap, so the interval is wider for them: see ``mean_interval``.

    Args:
        monitor: A metric of the validation split.
        minimise: Whether a lower value is better.
    """
    points: dict[str, list[TrialRun]] = {}
    for run in runs:
        points.setdefault(point_name(run), []).append(run)
    folds = len({run.fold for run in runs if run.fold is not None})
    by_seed = {
        name: {
            (run.seed, run.fold): run.metrics[monitor]
            for run in members
            if run.metrics and math.isfinite(run.metrics.get(monitor, math.nan))
        }
        for name, members in points.items()
    }
    means = {name: fmean(values.values()) for name, values in by_seed.items() if values}
    complete = [name for name, members in points.items() if len(by_seed[name]) == len(members)]
    best = min(complete, key=lambda name: means[name] if minimise else -means[name], default=None)
    results = []
    for name, members in points.items():
        values = by_seed[name]
        pairs = (
            [value - by_seed[best][key] for key, value in values.items() if key in by_seed[best]]
            if best is not None
            else []
        )
        results.append(
            {
                "point": name,
                "values": members[0].values,
                "runs": [run.name for run in members],
                "finished": len(values),
                "mean": means.get(name),
                "deviation": stdev(values.values()) if len(values) > 1 else None,
                "difference": _difference(pairs, 1 / (folds - 1) if folds > 1 else 0.0)
                if pairs and name != best
                else None,
            }
        )
    return results, best


def point_name(run: TrialRun) -> str:
    """The values of a point, as on the command line."""
    return " ".join(f"{key}={value}" for key, value in run.values.items()) or "recipe"


def _difference(pairs: Sequence[float], overlap: float) -> dict[str, Any]:
    low, high = mean_interval(pairs, overlap) or (None, None)
    return {"mean": fmean(pairs), "low": low, "high": high, "pairs": len(pairs)}


def show(results: Sequence[dict[str, Any]], best: str | None, monitor: str) -> None:
    """Print the table of a sweep."""
    import rich
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("point", overflow="fold")
    for column in ("runs", f"validation {monitor}", "deviation", "minus best", "95% interval"):
        table.add_column(column, justify="right")
    for row in results:
        over = row["difference"]
        interval = f"{over['low']:+.4g} to {over['high']:+.4g}" if over and over["low"] is not None else ""
        table.add_row(
            row["point"],
            f"{row['finished']}/{len(row['runs'])}",
            "" if row["mean"] is None else f"{row['mean']:.4f}",
            "" if row["deviation"] is None else f"{row['deviation']:.4f}",
            "best" if row["point"] == best else f"{over['mean']:+.4g}" if over else "",
            interval,
        )
    rich.print(table)
