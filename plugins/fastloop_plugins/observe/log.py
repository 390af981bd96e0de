"""Writes the log of a run to the run folder: ``metrics.jsonl`` (one object a log point) and ``log.txt``.

    plugins:
      - log
    train: {log_every: 10}

A log point has the step, the epoch from 1 and, over the steps since the last one, the mean ``loss``,
``samples_per_second`` and ``tokens_per_second``. ``grad_norm`` is the total 2-norm of its own step's gradients before
clipping (null: infinite), ``lr`` the learning rate of the first parameter group (that of parameters without arguments
of their own), ``memory_bytes`` what the device holds. The core measures these values, in ``fastloop.log_points``. An
evaluation is an object with its ``split``. Rows of ``run.log_rows``, such as samples of generated texts, are in
``rows/NAME.jsonl``, with their step. ``log.txt`` begins with the lines about data and model, which are logged before
there is a run folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fastloop import Plugin, Problem, __version__, hookimpl
from fastloop.plugins.installed import installed_version
from fastloop.problem import clause
from fastloop.recipe import secrets
from fastloop.runtime import json_text
from fastloop.runtime.files import no_follow
from fastloop.splits import evaluated_split

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


@functools.cache
def read_versions() -> dict[str, str | None]:
    """The versions that ``summary.json`` shows. A process may train many runs, and reads them once."""
    return {
        "python": platform.python_version(),
        "fastloop": __version__,
        "torch": installed_version("torch"),
        "accelerate": installed_version("accelerate"),
    }


class _EarlyRecords(logging.Handler):
    """Keeps the records that are logged before there is a run folder."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _LogFile(logging.FileHandler):
    """Writes no secrets, and raises nothing when the disk is full: the console shows a warning."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=no_follow)

    def format(self, record: logging.LogRecord) -> str:
        """The message and its traceback, without secrets."""
        return secrets.hide(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the file is closed: another thread may log at that moment, and logging would open the
        file again."""
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Log(Plugin):
    """Writes metrics.jsonl and log.txt into the run folder."""

    name = "log"
    read_only = True
    numerics = "bitwise"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.offset = 0  # where the last line that was written ends
        self.row_offsets: dict[str, int] = {}  # the same for each file of rows
        self.lost = False
        self.metrics: IO[bytes] | None = None
        self.early: _EarlyRecords | None = None
        self.handler: logging.Handler | None = None
        self.versions: dict[str, str | None] = {}

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "every run keeps its log"

    @hookimpl(tryfirst=True)
    def check_recipe(self) -> None:
        self.take_early_records()  # of a build that was given up
        self.early = _EarlyRecords()
        logger.addHandler(self.early)

    @hookimpl
    def before_fit(self, run: Run) -> None:
        early = self.take_early_records()
        if not run.is_main:
            return
        # Read now: at the end of a run that failed, there may be no memory for it.
        self.versions = dict(read_versions())
        path = run.folder / "metrics.jsonl"
        self.metrics = open(path, "ab", opener=no_follow)  # noqa: SIM115 # teardown closes it
        # a resumed run repeats the steps after its last checkpoint
        self.metrics.truncate(min(self.offset, path.stat().st_size))
        self.offset = self.metrics.seek(0, os.SEEK_END)
        for file in (run.folder / "rows").glob("*.jsonl"):
            with open(file, "ab", opener=no_follow) as opened:
                opened.truncate(min(self.row_offsets.get(file.stem, 0), file.stat().st_size))
        self.handler = _LogFile(run.folder / "log.txt")
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        for record in early:
            self.handler.handle(record)
        logger.addHandler(self.handler)

    @hookimpl
    def log_scalars(self, run: Run, scalars: Mapping[str, float], step: int) -> None:
        from fastloop.scalars import CORE_NAMES

        values: dict[str, Any] = {}
        split = evaluated_split(scalars, run.eval_loaders)
        if split is not None:
            values["split"] = split
        for name, value in scalars.items():
            if split is not None:
                values[name.removeprefix(f"{split}/")] = value
            elif name in CORE_NAMES:
                values[name.removeprefix("train/")] = value
            else:
                values[name] = value
        self.write(run, step, values)

    @hookimpl
    def log_rows(self, run: Run, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        lines = [json_text.dumps({"step": step, **row}, ensure_ascii=False) + "\n" for row in rows]
        path = run.folder / "rows" / f"{name}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            with open(path, "ab", opener=no_follow) as file:
                file.write("".join(lines).encode())
                self.row_offsets[name] = file.tell()
        except OSError as error:
            self.warn_once(path, error)

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        self.sync()
        summary["versions"] = self.versions

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        self.sync()  # a checkpoint must not be ahead of the log after a loss of power
        return {"offset": self.offset, "rows": dict(self.row_offsets)}

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        rows = state.get("rows", {})  # earlier checkpoints have none
        check_form({"offset": state.get("offset"), "rows": [*rows.values()]}, {"offset": 0, "rows": [0]})
        self.offset = state["offset"]
        self.row_offsets = dict(rows)

    @hookimpl(trylast=True)
    def teardown(self) -> None:  # last, to record the errors of other plugins' teardown
        self.take_early_records()
        if self.metrics is not None:
            with contextlib.suppress(OSError):
                self.metrics.close()
            self.metrics = None
        if self.handler is not None:
            logger.removeHandler(self.handler)
            self.handler.close()
            self.handler = None

    def take_early_records(self) -> list[logging.LogRecord]:
        """The records since ``check_recipe``. Keeps no more."""
        if self.early is None:
            return []
        logger.removeHandler(self.early)
        records = self.early.records
        self.early = None
        return records

    def sync(self) -> None:
        """Flush ``metrics.jsonl`` to disk. A later checkpoint or summary tries again if this fails."""
        if self.metrics is not None:
            with contextlib.suppress(OSError):
                os.fsync(self.metrics.fileno())

    def write(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl`` (main process only)."""
        if self.metrics is None:
            return
        epoch = run.state.epoch
        if run.state.epoch_samples > 0:  # not at an epoch's end: its values are logged before the next one begins
            epoch += 1
        line = {"step": step, "epoch": epoch, **values}
        try:
            self.metrics.write((json_text.dumps(line) + "\n").encode())
            self.metrics.flush()  # lines that a full disk rejects are written with the next line
            self.offset = self.metrics.tell()
        except OSError as error:
            self.warn_once(run.folder / "metrics.jsonl", error)

    def warn_once(self, path: Path, error: OSError) -> None:
        """Log the first file that cannot be written."""
        if not self.lost:
            self.log.warning(
                Problem(f"{path} cannot be written: {clause(error)}. Lines may be lost.", code="file-not-writable")
            )
        self.lost = True
