"""The record of a sweep or a search: its runs and their results, in the file ``sweep.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError
from fastloop.recipe import secrets
from fastloop.runtime import files
from fastloop_tools.report.records import MALFORMED, check_sweep, read_json
from fastloop_tools.trials import points
from fastloop_tools.trials.runs import TrialRun, check_metric


class Record:
    """The file ``sweep.json``.

    Args:
        folder: The sweep's folder, which contains the run folders.
        origin: The recipe's file, and the recipe without the grid's values.
        runs: The runs of the grid. Their state is in the file.
        again: The command that continues the sweep.
    """

    def __init__(
        self, folder: Path, origin: dict[str, Any], runs: list[TrialRun], monitor: str, minimise: bool, again: str
    ) -> None:
        self.again = again
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
                    f"output: {folder} contains a sweep. Set another output, or continue it with: {self.again}"
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
                    check_metric(run, self.monitor)
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def write(self) -> None:
        """Write the file, with the results so far."""
        write_record(self.file.parent, self.origin, self.runs, self.monitor, self.minimise)


def write_record(
    folder: Path, origin: Mapping[str, Any], runs: Sequence[TrialRun], monitor: str, minimise: bool
) -> None:
    """Write ``sweep.json``. Several workers may write it at once.

    Args:
        origin: Further entries: the settings of the trials.
    """
    compared, best = points.compare(runs, monitor, minimise)
    record = {
        **origin,
        "monitor": f"validation {monitor}",
        "better": "lower" if minimise else "higher",
        "best": best,
        "points": compared,
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    files.write(folder / "sweep.json", json.dumps(secrets.hidden(record), indent=2) + "\n", hidden=True)
