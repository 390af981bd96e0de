"""The record of a sweep or a search: its runs and their results, in the file ``sweep.json``."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fastloop.checkpoint.run_folder import move_earlier_run
from fastloop.errors import UsageError
from fastloop.metric_modes import MetricMode
from fastloop.problem import clause
from fastloop.recipe import secrets
from fastloop.runtime import files, json_text
from fastloop_tools.shared.json_files import MALFORMED, read_json
from fastloop_tools.shared.result_folders import make_output_folder
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
        self.file = folder / "sweep.json"
        self.runs = runs
        self.monitor = monitor
        self.mode = mode
        self.origin = json.loads(json.dumps(secrets.hidden(origin), default=str))

    def start(self, resume: bool, again: str) -> None:
        """Create the file, or take over the finished runs of an existing one. The folder of an earlier run of
        `fastloop train` is renamed, as a new run does it.

        Args:
            again: The command that continues the sweep.

        Raises:
            UsageError: The folder has other content, or a sweep of another recipe, or one and ``resume`` is False.
            RecipeError: Another process trains in the folder.
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
        elif not resume and (folder / "recipe.yaml").is_file():
            move_earlier_run(folder, self.origin["recipe"])
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise used_folder(folder, "sweep")
        make_output_folder(folder, "output")
        self.write()

    def _take_over(self, earlier: dict[str, Any]) -> None:
        try:
            finished = [run for run in parse_runs(earlier["runs"]) if run.status == "finished"]
        except MALFORMED as error:
            expected = f"the runs that `fastloop sweep` writes: {clause(error)}"
            raise UsageError(code="wrong-format", place=str(self.file), expected=expected) from None
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
                run.name = same.name
                run.status = same.status
                run.metrics = same.metrics

    def contents(self) -> dict[str, Any]:
        """The results so far."""
        points, best = compare(self.runs, self.monitor, self.mode)
        better = None
        if self.mode is not None:
            better = "lower" if self.mode == "min" else "higher"
        return {
            **self.origin,
            "monitor": f"validation {self.monitor}",
            "better": better,
            "best": best,
            "points": points,
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }

    def write(self) -> None:
        """Write the file. Several workers may write it at once."""
        files.write(self.file, json_text.dumps(secrets.hidden(self.contents()), indent=2) + "\n", hidden=True)

    def show(self) -> None:
        """Print the table of the points."""
        table = results_table(self.contents())
        rows = []
        for name, cells in table.rows:
            row = [name]
            for cell in cells:
                row.append(f"{cell.text} (best)" if cell.best else cell.text)
            rows.append(row)
        show_table([table.corner, *table.columns], rows)


def used_folder(folder: Path, kind: str) -> UsageError:
    """The error for an output folder that holds something else, such as a run of the same recipe.

    Args:
        kind: ``sweep`` or ``search``, whose runs get folders of their own in the output folder.
    """
    override = shlex.quote(f"output={files.free_name(folder, kind)}")
    if not folder.is_dir():
        contents = "a file"
    elif (folder / "recipe.yaml").is_file():
        contents = "a folder with a run of `fastloop train`"
    elif (folder / "sweep.json").is_file():
        contents = "a folder with a sweep"
    else:
        contents = f"a folder with {files.list_entries(folder)}"
    return UsageError(
        f"{folder} is {contents}, and a {kind} needs a folder of its own for its runs.",
        code="folder-not-empty",
        place="output",
        remedy=f"Add {override} to the command.",
    )


def compare(runs: Sequence[TrialRun], monitor: str, mode: MetricMode | None) -> tuple[list[dict[str, Any]], str | None]:
    """The results of each point, and the name of the best point.

    The best point has the best mean of the points whose runs have all finished with a finite value; None: there is no
    such point, or ``mode`` is unknown. ``difference`` is a point's value minus the best point's for the same seed and
    fold. Its 95% interval needs two pairs. The training sets of folds overlap, so the interval is wider for them: see
    ``mean_interval``.
    """
    points: dict[str, list[TrialRun]] = {}
    for run in runs:
        name = " ".join(f"{key}={value}" for key, value in run.values.items()) or "recipe"
        points.setdefault(name, []).append(run)
    values = {name: finite_values(members, monitor) for name, members in points.items()}
    best = best_point(points, values, mode)
    folds = len({run.fold for run in runs if run.fold is not None})
    results = []
    for name, members in points.items():
        own = values[name]
        best_values = {} if best is None or best == name else values[best]
        results.append(
            {
                "point": name,
                "values": members[0].values,
                "runs": [run.name for run in members],
                "finished": len(own),
                "mean": fmean(own.values()) if own else None,
                "deviation": stdev(own.values()) if len(own) > 1 else None,
                "difference": difference(own, best_values, folds),
            }
        )
    return results, best


SeedAndFold = tuple[int | None, int | None]


def finite_values(runs: Iterable[TrialRun], monitor: str) -> dict[SeedAndFold, float]:
    """The metric of each run of a point by its seed and fold, without runs whose value is missing or not finite."""
    values = {}
    for run in runs:
        value = (run.metrics or {}).get(monitor, math.nan)
        if math.isfinite(value):
            values[run.seed, run.fold] = value
    return values


def best_point(
    points: Mapping[str, Sequence[TrialRun]],
    values: Mapping[str, Mapping[SeedAndFold, float]],
    mode: MetricMode | None,
) -> str | None:
    """The point with the best mean, of those whose runs have all finished; None: there is none, or no mode."""
    means = {}
    for name, members in points.items():
        if len(values[name]) == len(members):
            means[name] = fmean(values[name].values())
    if mode is None or not means:
        return None
    choose = min if mode == "min" else max
    return choose(means, key=means.__getitem__)


def difference(
    values: Mapping[SeedAndFold, float], reference: Mapping[SeedAndFold, float], folds: int
) -> dict[str, Any] | None:
    """The mean difference of a point from another over the seeds and folds that both have, with its 95% interval; None:
    there are none.

    Args:
        folds: Folds of the data that the runs validate on; 0: there are none.
    """
    pairs = [value - reference[key] for key, value in values.items() if key in reference]
    if not pairs:
        return None
    overlap = 1 / (folds - 1) if folds > 1 else 0.0
    low, high = mean_interval(pairs, overlap) or (None, None)
    return {"mean": fmean(pairs), "low": low, "high": high, "pairs": len(pairs)}


def results_table(record: Mapping[str, Any]) -> ReportTable:
    """The points of a sweep, from the contents of its record."""
    rows = []
    for point in record["points"]:
        over_best = ""
        interval = ""
        over = point["difference"] or {}
        if over.get("mean") is not None:
            over_best = number(over["mean"])
        if over.get("low") is not None:  # from two pairs on
            interval = f"{number(over['low'])} to {number(over['high'])}"
        cells = [
            Cell(f"{point['finished']} of {len(point['runs'])}"),
            Cell("" if point["mean"] is None else number(point["mean"]), best=point["point"] == record["best"]),
            Cell("" if point["deviation"] is None else number(point["deviation"])),
            Cell(over_best),
            Cell(interval),
        ]
        rows.append((point["point"], cells))
    measured = record["monitor"]
    if record.get("better"):
        measured += f" ({record['better']} is better)"
    columns = ["runs", measured, "deviation", "minus best", "95% interval"]
    return ReportTable("point", columns, rows, numbers=True)
