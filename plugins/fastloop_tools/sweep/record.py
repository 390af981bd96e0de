"""The record of a sweep: its runs and their results, in the file ``sweep.json``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError, did_you_mean
from fastloop.recipe import secrets
from fastloop.runtime import files
from fastloop_tools.report.records import MALFORMED, check_sweep, read_json
from fastloop_tools.sweep import results
from fastloop_tools.sweep.grid import SweepRun


class Record:
    """The file ``sweep.json``.

    Args:
        folder: The sweep's folder, which contains the run folders.
        origin: The recipe's file, and the recipe without the grid's values.
        runs: The runs of the grid. Their state is in the file.
    """

    def __init__(
        self, folder: Path, origin: dict[str, Any], runs: list[SweepRun], monitor: str, minimise: bool
    ) -> None:
        self.file, self.runs, self.monitor, self.minimise = folder / "sweep.json", runs, monitor, minimise
        self.origin = json.loads(json.dumps(secrets.hidden(origin), default=str))

    def start(self, resume: bool) -> None:
        """Create the file, or take over the finished runs of an existing one.

        Raises:
            UsageError: The folder has other content, or a sweep of another recipe, or one and ``resume`` is False.
        """
        folder = self.file.parent
        if not resume or not self.file.is_file():
            if self.file.is_file():
                raise UsageError(
                    f"output: {folder} contains a sweep. Continue it with --resume, or set another output."
                )
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UsageError(
                    f"output: {folder} is not an empty folder. Set another output, such as output={folder}-sweep."
                )
        else:
            files.check_links(folder)
            earlier = read_json(self.file)
            check_sweep(earlier, self.file)
            try:
                known = {
                    (str(run["values"]), run["seed"], run.get("fold")): run
                    for run in earlier["runs"]
                    if run["status"] == "finished"
                }
                origin = {key: earlier[key] for key in self.origin}
            except MALFORMED as error:
                raise UsageError(f"{self.file}: cannot be read: {type(error).__name__}: {error}.") from None
            if origin != self.origin:
                raise UsageError(
                    f"{self.file}: the recipe or its overrides have changed since this sweep began. Set another output."
                )
            for run in self.runs:
                if same := known.get((str(run.values), run.seed, run.fold)):
                    run.name, run.status, run.metrics = same["name"], same["status"], same["metrics"]
                    self.check_metric(run)
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def write(self) -> None:
        """Write the file, with the results so far."""
        points, best = self.compare()
        record = {
            **self.origin,
            "monitor": f"validation {self.monitor}",
            "better": "lower" if self.minimise else "higher",
            "best": best,
            "points": points,
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }
        files.write(self.file, json.dumps(secrets.hidden(record), indent=2) + "\n", hidden=True)

    def compare(self) -> tuple[list[dict[str, Any]], str | None]:
        """The results of each point, and the name of the best point; see ``results.compare``."""
        return results.compare(self.runs, self.monitor, self.minimise)

    def read_summary(self, run: SweepRun) -> dict[str, Any]:
        """The summary of a run; empty if it has written none."""
        try:
            found: dict[str, Any] = json.loads(
                (self.file.parent / run.name / "summary.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def check_metric(self, run: SweepRun) -> None:
        """Check that a finished run has the metric to compare.

        Raises:
            UsageError: It has none; the message lists its metrics.
        """
        if run.status == "finished" and self.monitor not in (run.metrics or {}):
            there = f"has no metric {self.monitor!r}" if run.metrics else "does not exist"
            raise UsageError(
                f"--monitor {self.monitor}: the validation split "
                f"{there}.{did_you_mean(self.monitor, run.metrics or ())}"
            )
