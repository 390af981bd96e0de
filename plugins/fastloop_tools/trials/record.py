"""The record of a sweep or a search: its runs and their results, in the file ``sweep.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fastloop.errors import UsageError
from fastloop.metric_modes import MetricMode
from fastloop.recipe import secrets
from fastloop.runtime import files
from fastloop_tools.shared.json_files import MALFORMED, read_json
from fastloop_tools.shared.svg import number
from fastloop_tools.shared.tables import Cell, ReportTable, show_table
from fastloop_tools.trials.runs import TrialRun, parse_runs
from fastloop_tools.trials.statistics import mean_interval


class Record:
    """The file ``sweep.json`` in the folder of the trials.

    Args:
        origin: The recipe's file, and the recipe without the values of the runs.
        runs: The runs. Their state is in the file.
        monitor: A metric of the validation split.
        mode: Which of its values are better; None: not known before a run has finished.
    """

    def __init__(
        self, folder: Path, origin: dict[str, Any], runs: list[TrialRun], monitor: str, mode: MetricMode | None
    ) -> None:
        self.file, self.runs, self.monitor, self.mode = folder / "sweep.json", runs, monitor, mode
        self.origin = json.loads(json.dumps(secrets.hidden(origin), default=str))

    def start(self, resume: bool, again: str) -> None:
        """Create the file, or take over the finished runs of an existing one.

        Args:
            again: The command that continues the sweep.

        Raises:
            UsageError: The folder has other content, or a sweep of another recipe, or one and ``resume`` is False.
        """
        folder = self.file.parent
        if not resume and self.file.is_file():
            raise UsageError(
                f"{folder} contains a sweep.",
                code="folder-not-empty",
                place="output",
                remedy="Set another output, or continue it with:",
                command=again,
            )
        if self.file.is_file():
            files.check_links(folder)
            self._take_over(read_json(self.file))
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} is not an empty folder.",
                code="folder-not-empty",
                place="output",
                remedy=f"Set another output, such as output={folder}-sweep.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def _take_over(self, earlier: dict[str, Any]) -> None:
        try:
            finished = [run for run in parse_runs(earlier["runs"]) if run.status == "finished"]
        except MALFORMED as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                code="wrong-format", place=str(self.file), expected=f"the runs that `fastloop sweep` writes: {reason}"
            ) from None
        if any(earlier.get(key) != value for key, value in self.origin.items()):
            raise UsageError(
                "the recipe or its overrides have changed since this sweep began.",
                code="resume-differs",
                place=str(self.file),
                remedy="Set another output.",
            )
        known = {run.point: run for run in finished}
        for run in self.runs:
            same = known.get(run.point)
            if same is not None:
                run.name, run.status, run.metrics = same.name, same.status, same.metrics

    def contents(self) -> dict[str, Any]:
        """The results so far."""
        points, best = compare(self.runs, self.monitor, self.mode)
        return {
            **self.origin,
            "monitor": f"validation {self.monitor}",
            "better": {"min": "lower", "max": "higher", None: None}[self.mode],
            "best": best,
            "points": points,
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }

    def write(self) -> None:
        """Write the file. Several workers may write it at once."""
        files.write(self.file, json.dumps(secrets.hidden(self.contents()), indent=2) + "\n", hidden=True)

    def show(self) -> None:
        """Print the table of the points."""
        table = results_table(self.contents())
        rows = [
            [name, *(f"{cell.text} (best)" if cell.best else cell.text for cell in cells)] for name, cells in table.rows
        ]
        show_table([table.corner, *table.columns], rows)


def compare(runs: Sequence[TrialRun], monitor: str, mode: MetricMode | None) -> tuple[list[dict[str, Any]], str | None]:
    """The results of each point, and the name of the best point.

    The best point has the best mean of the points whose runs have all finished with a finite value; None: there is no
    such point, or ``mode`` is unknown. ``difference`` is a point's value minus the best point's for the same seed and
    fold. Its 95% interval needs two pairs. The training sets of folds overlap, so the interval is wider for them: see
    ``mean_interval``.
    """
    points: dict[str, list[TrialRun]] = {}
    for run in runs:
        points.setdefault(" ".join(f"{key}={value}" for key, value in run.values.items()) or "recipe", []).append(run)
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
    best = None
    if mode is not None and complete:
        best = min(complete, key=means.__getitem__) if mode == "min" else max(complete, key=means.__getitem__)
    results = []
    for name, members in points.items():
        values, theirs = by_seed[name], by_seed[best] if best not in (None, name) else {}
        pairs = [value - theirs[key] for key, value in values.items() if key in theirs]
        low, high = mean_interval(pairs, 1 / (folds - 1) if folds > 1 else 0.0) or (None, None)
        results.append(
            {
                "point": name,
                "values": members[0].values,
                "runs": [run.name for run in members],
                "finished": len(values),
                "mean": means.get(name),
                "deviation": stdev(values.values()) if len(values) > 1 else None,
                "difference": {"mean": fmean(pairs), "low": low, "high": high, "pairs": len(pairs)} if pairs else None,
            }
        )
    return results, best


def results_table(record: Mapping[str, Any]) -> ReportTable:
    """The points of a sweep, from the contents of its record."""
    rows = []
    for point in record["points"]:
        over = point["difference"] or {}
        shown = {key: "" if over.get(key) is None else number(over[key]) for key in ("mean", "low", "high")}
        mean, deviation = ("" if point[key] is None else number(point[key]) for key in ("mean", "deviation"))
        interval = f"{shown['low']} to {shown['high']}" if shown["low"] else ""
        texts = [f"{point['finished']} of {len(point['runs'])}", mean, deviation, shown["mean"], interval]
        best = point["point"] == record["best"]
        rows.append((point["point"], [Cell(text, best and at == 1) for at, text in enumerate(texts)]))
    better = record.get("better")
    measured = record["monitor"] + (f" ({better} is better)" if better else "")
    columns = ["runs", measured, "deviation", "minus best", "95% interval"]
    return ReportTable("point", columns, rows, numbers=True)
