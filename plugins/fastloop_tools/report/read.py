"""Reads the folders that ``train``, ``evaluate``, ``sweep``, ``bench`` and ``profile`` write. ``metrics_log`` reads
their ``metrics.jsonl``.

Skips missing files; an error names a broken one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from fastloop.errors import UsageError
from fastloop.problem import clause, typed_clause
from fastloop.recipe import safe_yaml
from fastloop.recipe.paths import nothing_at
from fastloop_tools.report.metrics_log import Series, read_log
from fastloop_tools.shared.json_files import MALFORMED, Number, read_json

RECORDS = ("sweep.json", "bench.json", "profile.json")
"""Files of which a folder has one instead of a run."""
MOST_ROWS = 20
"""Most rows of ``run.log_rows`` on the page, for each name."""
EVALUATIONS = "evaluation"
"""The folder in a run folder with results of ``fastloop evaluate``."""


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
    """A sample that the model got wrong. ``input`` is None if it has no text, and ``place`` if its file is unknown."""

    index: int
    target: str
    prediction: str
    target_probability: Number
    prediction_probability: Number
    input: str | None
    place: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evaluation:
    """A result of ``fastloop evaluate``.

    Attributes:
        steps: Optimizer steps of the evaluated run; None: unknown.
        confusion: Counts, target by prediction; empty without classes.
        arguments: The recipe and overrides of the command.
    """

    metrics: dict[str, Number]
    classes: list[Class]
    confusion: list[list[int]]
    split: str | None = None
    file: str | None = None
    steps: int | None = None
    arguments: list[str] | None = None
    worst: list[WorstSample] | None = field(default_factory=list)

    @property
    def samples(self) -> int:
        """The number of samples of all classes."""
        return sum(row.samples for row in self.classes)


@dataclass
class TrainedRun:
    """A run folder.

    Attributes:
        name: A short name, unique on the page.
        lines: Value -> its series, by the names in ``metrics.jsonl``: ``loss``, ``samples_per_second``, ...,
            ``validation accuracy``.
        rows: Name -> the last rows of ``run.log_rows``: those of the newest step.
    """

    folder: Path
    name: str
    summary: dict[str, Any] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Series] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass
class PageContents:
    """The contents of the page."""

    runs: list[TrainedRun] = field(default_factory=list)
    ablations: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    profiles: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sweeps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def add(self, file: str, name: str, record: dict[str, Any]) -> None:
        """Add the content of a file of ``RECORDS`` under the name of its folder."""
        if file == "sweep.json":
            self.sweeps.append((name, record))
        elif file == "bench.json":
            self.ablations.append((name, record))
        else:
            self.profiles.append((name, record))


def read(folders: Iterable[Path]) -> PageContents:
    """Read everything in the given folders.

    Raises:
        UsageError: A folder contains none of these outputs, or a file cannot be read.
    """
    contents = PageContents()
    names = dict[str, int]()

    def unique(folder: Path) -> str:
        name = folder.name or folder.resolve().name
        names[name] = names.get(name, 0) + 1
        return name if names[name] == 1 else f"{name} ({names[name]})"

    for folder in folders:
        name = unique(folder)
        if _is_run(folder):
            contents.runs.append(_run(folder, name))
            continue
        file = next((file for file in RECORDS if (folder / file).is_file()), None)
        if file is None:
            problem = "contains no run, sweep, ablation or profile"
            remedy = ""
            if folder.is_file():
                problem = "is a file"
                remedy = f"Give the folder, not its files: `fastloop report {quote(str(folder.parent))}`."
            elif not folder.is_dir():
                problem = nothing_at(folder, "folder")
            raise UsageError(
                f"{problem}.",
                code="not-a-run",
                place=str(folder),
                expected="an output folder of `fastloop train`, `sweep`, `bench` or `profile`",
                remedy=remedy,
            )
        record = read_json(folder / file)
        part = PageContents()
        part.add(file, name, record)
        _check(part, folder / file)
        contents.add(file, name, record)
        if file == "sweep.json":
            for run in record["runs"]:
                member = folder / run["name"]
                if _is_run(member):
                    contents.runs.append(_run(member, unique(member)))
    return contents


def _check(part: PageContents, path: Path) -> None:
    """Render the contents of one file alone, as a check of its form.

    Raises:
        UsageError: The file has another form than fastloop writes.
    """
    from jinja2 import TemplateError

    from fastloop_tools.report.page import render
    from fastloop_tools.trials.runs import parse_runs

    try:
        for _, sweep in part.sweeps:
            parse_runs(sweep["runs"])
        render(part, "")
    except (*MALFORMED, TemplateError) as error:
        raise UsageError(
            f"expected the results that fastloop writes ({typed_clause(error)}). Repeat the command, or "
            "remove the file.",
            code="wrong-format",
            place=str(path),
        ) from None


def _is_run(folder: Path) -> bool:
    """Whether a folder is that of a run which has logged or ended."""
    has_results = (folder / "metrics.jsonl").is_file() or (folder / "summary.json").is_file()
    return has_results and (folder / "recipe.yaml").is_file()


def _run(folder: Path, name: str) -> TrainedRun:
    run = TrainedRun(folder, name)
    if (folder / "summary.json").is_file():
        run.summary = read_json(folder / "summary.json")
        _check(PageContents([run]), folder / "summary.json")
    try:
        recipe = safe_yaml.load((folder / "recipe.yaml").read_text(encoding="utf-8"), str(folder / "recipe.yaml"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot be read: {clause(error)}.", code="file-unreadable", place=str(folder / "recipe.yaml")
        ) from None
    run.recipe = recipe if isinstance(recipe, dict) else {}
    log = folder / "metrics.jsonl"
    if log.is_file():
        run.lines = read_log(log)
    run.rows = {path.stem: read_last_rows(path) for path in sorted((folder / "rows").glob("*.jsonl"))}
    run.evaluations = [read_evaluation(path) for path in sorted((folder / EVALUATIONS).glob("*.json"))]
    return run


def read_last_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the newest step in a file of ``run.log_rows``, at most ``MOST_ROWS``.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        last = [row for row in rows if row["step"] == rows[-1]["step"]]
    except (OSError, *MALFORMED) as error:
        raise UsageError(f"cannot be read: {clause(error)}.", code="file-unreadable", place=str(path)) from None
    return last[:MOST_ROWS]


def read_evaluation(path: Path) -> Evaluation:
    """Read a result of ``fastloop evaluate``.

    Raises:
        UsageError: The file cannot be read, or has another form.
    """
    from pydantic import TypeAdapter

    try:
        evaluation = TypeAdapter(Evaluation).validate_python(read_json(path))
        if {len(evaluation.confusion), *map(len, evaluation.confusion)} - {len(evaluation.classes)}:
            raise ValueError("the classes and their confusions differ in number")
    except MALFORMED:
        raise UsageError(
            code="wrong-format",
            place=str(path),
            expected="the results that `fastloop evaluate` writes",
            remedy="Evaluate the run again, or remove the file.",
        ) from None
    return evaluation
