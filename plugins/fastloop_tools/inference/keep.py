"""``fastloop predict --keep``: columns of the file, or of a split's file, beside the predictions of its rows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.errors import UsageError, did_you_mean
from fastloop.problem import counted
from fastloop_plugins.rows.formats import ROWS_AT_ONCE, KeptColumns
from fastloop_plugins.rows.paths import find_files
from fastloop_plugins.text.class_numbers import numbered

if TYPE_CHECKING:
    import pyarrow

    from fastloop import Run
    from fastloop_plugins.text.task import TextTask

log = logging.getLogger("fastloop")

ALL = "all"
"""Value of ``--keep`` for every column of the file."""
FIRST_ROWS = 1024
"""Rows that are read for the names of a file's columns: objects of a .jsonl file need not have the same keys."""


@dataclass(frozen=True)
class KeptColumn:
    """A column to keep.

    Attributes:
        name: Its name beside the predictions.
        source: Its name in the file.
        class_names: Number -> name, where the file names the classes of a column of numbers; empty: it does not.
    """

    name: str
    source: str
    class_names: Mapping[int, str] = field(default_factory=dict)

    def named(self, value: Any) -> Any:
        """A value of the file, with the names of classes: ``pos`` for 1, ``[neg, pos]`` for [0, 1]. A number without a
        name is text, too, such as -1 of a row without a label: a column has one type."""
        if not self.class_names:
            return value
        if isinstance(value, list):
            return [self.named(item) for item in value]
        return self.class_names.get(value, str(value)) if isinstance(value, int) else value


class KeepOption:
    """The option ``--keep``: columns of a file to write beside the predictions of its rows.

    Args:
        listed: ``COLUMN``, ``NAME=COLUMN`` or ``all``.

    Attributes:
        columns: The columns, in the order of the output; known when the file is open.
        types: Name -> type in pyarrow, for the columns of a format that has types.
        kept: Values of the columns in the rows that are read and not taken yet.
    """

    def __init__(self, listed: Sequence[str]) -> None:
        self.listed = listed
        self.columns: list[KeptColumn] = []
        self.types: dict[str, Any] = {}
        self.path = Path()
        self.kept = KeptColumns([])
        self._first_names: list[str] = []  # of the columns of the first rows
        self._rows: Iterator[object] | None = None  # reads them; None: the task does

    def open(self, run: Run, path: Path, start: int) -> None:
        """Find the columns in the first rows of a file to predict. The task then reads them with its own, from row
        ``start``.

        Raises:
            UsageError: The task reads no rows, or the file has no such column.
        """
        task = reading_task(run, path)
        self._find_columns(task, find_files(task.data.recipe, str(path), "predict", "FILE", task.data.formats)[0])
        self.kept = KeptColumns([column.source for column in self.columns], start)
        task.data.kept = self.kept
        self._rows = None

    def open_split(self, run: Run, split: str, first: Any, start: int) -> None:
        """Find the columns in the file of a split, whose samples may come from a cache. Begin at row ``start``.

        Args:
            first: See ``split_file``.

        Raises:
            UsageError: The task reads no rows, the split has no file with its rows, or that has no such column.
        """
        path = split_file(run, split, first)
        task = reading_task(run, path)
        self._find_columns(task, path)
        self.kept = KeptColumns([column.source for column in self.columns], start)
        self._rows = replace(task.data.layout(predicts=True), kept=self.kept).rows(str(path))

    def _find_columns(self, task: TextTask, path: Path) -> None:
        layout = task.data.layout(predicts=True)
        self.path = path
        with layout.reading(str(path)) as file:
            next(file.blocks(list(layout.columns), size=FIRST_ROWS), None)
            self._first_names = list(file.names)
            schema = file.schema
            class_names = file.class_names(self._first_names)
        self.columns = []
        for column in self._choose(self._first_names):
            names = numbered(class_names.get(column.source, ()), column.source, task.data)
            self.columns.append(replace(column, class_names=dict(names)))
        if schema is not None:
            self.types = {column.name: type_of(column, schema) for column in self.columns}

    def at(self, run: Run, path: Path, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
        """The columns of some rows of a file, by the numbers of their lines or rows, from 1.

        Raises:
            UsageError: The task reads no rows, or the file has no such column.
        """
        task = reading_task(run, path)
        layout = task.data.layout(predicts=True)
        self._find_columns(task, path)
        sources = [column.source for column in self.columns]
        count = 0
        kept_rows = {}
        with layout.reading(str(path)) as file:
            for block in file.blocks(sources, size=ROWS_AT_ONCE):
                lines = block.lines or range(count + 1, count + block.rows + 1)
                count += block.rows
                for number, values in zip(lines, block.tuples(sources), strict=True):
                    if number in numbers:
                        columns = zip(self.columns, values, strict=True)
                        kept_rows[number] = {column.name: column.named(value) for column, value in columns}
        return kept_rows

    def check_predicted(self, run: Run) -> None:
        """``check_names`` with the columns that the task predicts. Call it after ``build_prediction_data``."""
        self.check_names(reading_task(run, self.path).output_columns())

    def _choose(self, names: Sequence[str]) -> list[KeptColumn]:
        """The columns that ``listed`` names, of a file with columns of these names."""
        chosen = []
        for entry in self.listed:
            if entry == ALL:
                continue
            name, equals, source = entry.partition("=")
            if entry in names or not equals:  # a name may have an equals sign
                name = entry
                source = entry
            if source not in names:
                suggestion = did_you_mean(source, names).partition(" Expected")[0]
                raise UsageError(
                    f"there is no column {source!r}. Its columns: {', '.join(names) or 'none'}.",
                    code="unknown-column",
                    place=f"--keep: {self.path}",
                    remedy=suggestion,
                )
            chosen.append(KeptColumn(name, source))
        if ALL in self.listed:
            renamed = {column.source: column for column in chosen}
            chosen = [renamed.get(name, KeptColumn(name, name)) for name in names]
        chosen_names = [column.name for column in chosen]
        for name in chosen_names:
            if chosen_names.count(name) > 1:
                raise UsageError(
                    f"found two columns with the name {name!r}.",
                    code="repeated-column",
                    place="--keep",
                    remedy="Give another one: NAME=COLUMN.",
                )
        return chosen

    def check_names(self, predicted: Collection[str]) -> None:
        """Raise an error for a column whose name is the one of a prediction.

        Args:
            predicted: The columns that the task predicts.
        """
        for column in self.columns:
            if column.name in predicted:
                raise UsageError(
                    f"the task predicts a column {column.name!r}, too.",
                    code="repeated-column",
                    place="--keep",
                    remedy=f"Give the column of {self.path} another name: --keep input_{column.name}={column.source}",
                )

    def take(self, count: int) -> dict[str, list[Any]]:
        """The columns of the next ``count`` rows.

        Raises:
            UsageError: The file has fewer rows.
        """
        if not self.columns:
            return {}
        while self._rows is not None and len(self.kept.rows) < count:
            if next(self._rows, None) is None:
                break
        if len(self.kept.rows) < count:
            raise self._other_count()
        rows = [self.kept.rows.popleft() for _ in range(count)]
        taken = {}
        for place, column in enumerate(self.columns):
            taken[column.name] = [column.named(row[place]) for row in rows]
        return taken

    def finish(self) -> None:
        """Check that every row is predicted, and log the columns that only later rows have.

        Raises:
            UsageError: The file has more rows.
        """
        if not self.columns:
            return
        if self._rows is not None:
            next(self._rows, None)
        if self.kept.rows:
            raise self._other_count()
        later = [name for name in self.kept.names or () if name not in self._first_names]
        if ALL in self.listed and later:
            log.warning(
                Problem(
                    f"the first {FIRST_ROWS} rows lack the columns {', '.join(later)}, which are not kept.",
                    code="columns-left-out",
                    place=f"--keep all: {self.path}",
                    remedy="Write every key in each.",
                )
            )

    def _other_count(self) -> UsageError:
        return UsageError(
            "the task does not predict one sample for each row, so no column can be kept.",
            code="unsupported-task",
            place=f"--keep: {self.path}",
            remedy="Leave out --keep.",
        )


def type_of(column: KeptColumn, schema: pyarrow.Schema) -> pyarrow.DataType:
    """The type of a kept column in Parquet: that of the file, or text for classes with names."""
    import pyarrow

    kind = schema.field(column.source).type
    if not column.class_names:
        return kind
    return pyarrow.string() if pyarrow.types.is_integer(kind) else pyarrow.list_(pyarrow.string())


def split_file(run: Run, split: str, first: Any) -> Path:
    """The file whose rows are the samples of a split, in their order.

    Args:
        first: The first chunk of the split, a ``Subset`` of its dataset.

    Raises:
        UsageError: The split has no file of its own, or has other rows than its file.
    """
    from fastloop_plugins.text.task import TextTask

    task = next((plugin for plugin in run.plugins if isinstance(plugin, TextTask)), None)
    paths = [] if task is None else task.data.files.get(getattr(task.data.splits, split, split), [])
    if task is None or len(paths) != 1:
        raise UsageError(
            f"the split {split!r} has no file of its own.",
            code="exclusive-options",
            place="--keep",
            expected="a split whose rows are those of one file in data.files",
            remedy="Predict a file with these rows: `fastloop predict RUN FILE --keep ...`.",
        )
    path = Path(paths[0])
    layout = task.data.layout(predicts=True)
    columns = list(layout.columns)
    rows = 0
    with layout.reading(str(path)) as file:
        for block in file.blocks(columns, size=ROWS_AT_ONCE):
            rows += block.rows
    samples = len(getattr(first, "dataset", first))
    if rows != samples:
        raise UsageError(
            f"the split {split!r} has {counted(samples, 'sample')}, and its file {path} has {counted(rows, 'row')}.",
            code="exclusive-options",
            place="--keep",
            remedy=f"Predict the file: `fastloop predict RUN {quote(str(path))} --keep ...`.",
        )
    return path


def reading_task(run: Run, path: Path) -> TextTask:
    """The task of the run.

    Raises:
        UsageError: It reads no rows from this file.
    """
    from fastloop_plugins.text.task import TextTask

    if path.is_file():
        for plugin in run.plugins:
            if isinstance(plugin, TextTask):
                return plugin
    raise UsageError(
        f"the task {run.plugins.in_slot('task')!r} reads no columns from {path}.",
        code="unsupported-task",
        place="--keep",
        remedy="Predict a file with rows, or leave out --keep.",
    )
