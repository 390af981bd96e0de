"""Writes the columns of predictions to a file. The hook ``predict`` of the task computes them.
Formats of files to predict are in ``fastloop_plugins.rows``.

The predictions of each chunk of rows become a part: a numbered file in the folder ``FILE.parts``. Parts are kept until
the end, so that an interrupted job continues after the last complete part. The suffix ``.last`` marks the last part of
the job. The file is made from the parts in one step, so it is complete or absent, and it does not depend on
interruptions.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from fastloop.cli.streams import has_reader
from fastloop.errors import UsageError
from fastloop.problem import clause
from fastloop.runtime import files, json_text

if TYPE_CHECKING:
    from fastloop.checkpoint.lock import Lock

log = logging.getLogger("fastloop")

Columns = Mapping[str, Any]
"""Name -> a value for each row: a list, or an array of numbers, (rows, ...)."""


class PredictionOutput:
    """Predictions on their way to a file, or to stdout as JSON lines. ``close`` ends the lock on the parts.

    Args:
        path: The file; None: stdout.
        job: Everything that determines the predictions, as JSON values. Parts of another job are removed. None: the job
            cannot be repeated.

    Raises:
        UsageError: The file's format is unknown, or a link is in the place of the parts.
        RecipeError: Another process writes the parts.
    """

    def __init__(self, path: Path | None, job: Mapping[str, Any] | None) -> None:
        self.path = path
        self.parts: list[Path] = []
        self._lock: Lock | None = None
        if path is None:
            return
        if path.suffix not in PREDICTION_FORMATS:
            raise UsageError(
                code="unknown-format",
                place=f"--out {path}",
                found=f"the suffix {path.suffix!r}",
                expected=f"one of: {', '.join(PREDICTION_FORMATS)}",
            )
        self.folder = path.with_name(f"{path.name}.parts")
        is_file = self.folder.exists() and not self.folder.is_dir()
        if is_file or self.folder.is_symlink():
            raise UsageError(
                f"{self.folder} is a link or a file, where the parts are kept.",
                code="unsafe-link",
                place=f"--out {path}",
                remedy="Remove it, or give another file.",
            )
        files.check_links(self.folder)
        with files.naming(path):
            try:
                self._lock = self._lock_folder(path)
            except FileNotFoundError:  # another process has just ended its job, and removed the folder
                self._lock = self._lock_folder(path)
            self._start_job(job)
        self.parts = self._complete_parts()

    def _lock_folder(self, path: Path) -> Lock:
        """Make the folder of the parts, and lock it for this process."""
        from fastloop.checkpoint.lock import Lock  # only here: it imports torch, and the help imports this module

        self.folder.mkdir(exist_ok=True)
        return Lock(self.folder, f"--out {path}", "Wait for it to end, or give another file.")

    def _start_job(self, job: Mapping[str, Any] | None) -> None:
        """Keep the parts of an interrupted job. Remove those of another one."""
        identity = json.dumps(job)  # not sorted: the keys of data.label_map may be text and numbers
        file = self.folder / "job.json"
        continues = job is not None and file.is_file() and file.read_text(encoding="utf-8") == identity
        if continues:
            return
        has_predictions = bool(self._complete_parts())
        self._remove_parts()
        if has_predictions:
            log.info("%s: the parts of another job are removed", self.folder)
        files.write(file, identity, hidden=True)

    def _remove_parts(self) -> None:
        """Remove everything in the folder but the lock."""
        assert self._lock is not None
        paths = [path for path in self.folder.iterdir() if path != self._lock.path]
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Let other processes write the parts. Without a complete part, there is nothing to continue: remove their
        folder."""
        if self._lock is None:
            return
        if self._complete_parts():
            self._lock.release()
            self._lock = None
        else:
            self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the folder of the parts, and end the lock on it."""
        assert self._lock is not None
        try:
            self._remove_parts()
        finally:
            self._lock.remove()
            self._lock = None
        with contextlib.suppress(OSError):  # another process begins its own job there
            self.folder.rmdir()

    def _complete_parts(self) -> list[Path]:
        """The parts from the first on, without a gap: of the files 00000000, 00000001 and 00000003, the first two."""
        by_number = {path.name.partition(".")[0]: path for path in self.folder.glob("[0-9]*")}
        parts: list[Path] = []
        for number in range(len(by_number)):
            part = by_number.get(f"{number:08}")
            if part is None:
                break
            parts.append(part)
        return parts

    @property
    def complete(self) -> bool:
        """Whether all parts are there."""
        return bool(self.parts) and self.parts[-1].suffix == ".last"

    def add(self, columns: Mapping[str, list[Any]], last: bool, types: Mapping[str, Any] | None = None) -> None:
        """Write the predictions of the next chunk. Values that are tensors of one shape are written as arrays.

        Args:
            types: Name -> type in pyarrow, for Parquet. The types of other columns follow from their values.

        Raises:
            SystemExit: The program that reads stdout has closed it, as ``head`` does. No more samples are predicted.
            UsageError: The format cannot hold these columns.
        """
        table = {name: as_array(values) for name, values in columns.items()}
        try:
            self._write(table, last, types or {})
        except UnicodeEncodeError as error:
            raise half_character(table) or error from None

    def _write(self, table: Columns, last: bool, types: Mapping[str, Any]) -> None:
        """Write the next chunk. See ``add``."""
        if self.path is None:
            sys.stdout.writelines(json_lines(table))
            sys.stdout.flush()
            if not has_reader():
                raise SystemExit(1)
            return
        suffix = ".last" if last else ""
        part = self.folder / f"{len(self.parts):08}{suffix}"
        unfinished = self.folder / "unfinished"
        with files.naming(self.path):
            PREDICTION_FORMATS[self.path.suffix].write(PredictedRows(table, types, list(self.parts)), unfinished)
            unfinished.replace(part)
        self.parts.append(part)

    def finish(self) -> None:
        """Make the file from its parts, and remove them."""
        if self.path is None or self._lock is None:
            return
        joined = self.folder / "joined"
        with files.naming(self.path):
            PREDICTION_FORMATS[self.path.suffix].join(self.parts, joined)
            joined.replace(self.path)
        self._remove_folder()


@dataclass(frozen=True)
class PredictedRows:
    """Rows to write.

    Attributes:
        columns: Name -> a value for each row.
        types: See ``PredictionOutput.add``.
        before: The parts that are written.
    """

    columns: Columns
    types: Mapping[str, Any]
    before: Sequence[Path]


def as_array(values: list[Any]) -> Any:
    """Tensors of one shape as an array, (rows, ...); a missing one is NaN. Other values stay a list."""
    import torch

    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    forms = {(tensor.shape, tensor.dtype) for tensor in tensors}
    if len(forms) != 1:
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
    if len(tensors) < len(values):
        if not tensors[0].is_floating_point():
            return [None if value is None else value.tolist() for value in values]
        missing = torch.full_like(tensors[0], float("nan"))
        tensors = [missing if value is None else value for value in values]
    return torch.stack(tensors).numpy()


def rows(columns: Columns) -> Iterator[dict[str, Any]]:
    """The rows of a table."""
    lists = [values if isinstance(values, list) else values.tolist() for values in columns.values()]
    for values in zip(*lists, strict=True):
        yield dict(zip(columns, values, strict=True))


def json_value(value: Any) -> str:
    """A value of a kept column that JSON has no type for: see ``python_values``.

    Raises:
        UsageError: It is no text: bytes.
    """
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta | UUID):
        return str(value)
    if type(value).__name__ == "Time64Scalar":  # of pyarrow, which need not be installed
        return str(value.cast("string"))  # with nanoseconds, which str(value) leaves out
    raise UsageError(
        f"found a value of type {type(value).__name__}, which only .parquet can hold.",
        code="unknown-format",
        place="--keep",
        remedy="Write --out FILE.parquet, or leave out its column.",
    )


def half_character(columns: Columns) -> UsageError | None:
    """The error for a value that no file in UTF-8 can hold: a JSON file may have half of a UTF-16 pair, as in
    ``"\\ud83d"``. None: there is no such value."""
    for name, values in columns.items():
        if not isinstance(values, list):
            continue
        for value in values:
            try:
                json.dumps(value, ensure_ascii=False, default=str).encode()
            except UnicodeEncodeError:
                return UsageError(
                    f"the column {name!r} holds half of a UTF-16 pair, which is no text: {value!r:.60}.",
                    code="wrong-encoding",
                    place="--keep",
                    remedy="Correct it, or leave out the column.",
                )
    return None


def json_lines(columns: Columns) -> Iterator[str]:
    """One JSON object for each row."""
    return (json_text.dumps(row, ensure_ascii=False, default=json_value) + "\n" for row in rows(columns))


def cell(value: Any) -> Any:
    """A value as the cell of a CSV file."""
    if isinstance(value, list | dict):
        return json_text.dumps(value, default=json_value)
    if value is None or isinstance(value, str | int | float):
        return value
    return json_value(value)


def csv_lines(columns: Columns, header: bool) -> Iterator[str]:
    """Lines of cells, which end with LF; values that are lists or mappings are written as JSON.

    The module csv only puts quotes around the line ends of its own ``lineterminator``. With LF alone, readers would
    begin a row at each CR in a cell.
    """
    ending = "\r\n"
    line = io.StringIO(newline="")
    writer = csv.writer(line, lineterminator=ending)

    def written(cells: Iterable[Any]) -> str:
        line.seek(0)
        line.truncate()
        writer.writerow(cells)
        return line.getvalue().removesuffix(ending) + "\n"

    if header:
        yield written(columns)
    for row in rows(columns):
        yield written(map(cell, row.values()))


def write_csv(part: PredictedRows, path: Path) -> None:
    """A part with ``csv_lines``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(csv_lines(part.columns, header=not part.before))


def write_jsonl(part: PredictedRows, path: Path) -> None:
    """A part with ``json_lines``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(json_lines(part.columns))


def join_lines(parts: Sequence[Path], path: Path) -> None:
    """Put text files end to end."""
    with path.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)


def write_parquet(part: PredictedRows, path: Path) -> None:
    """A part in Parquet. Rows of an array are lists of numbers.

    Raises:
        UsageError: A column has values of several types.
    """
    import numpy as np
    import pyarrow
    from pyarrow import parquet

    def column(name: str, values: Any) -> Any:
        if isinstance(values, list):
            return pyarrow.array(values, part.types.get(name))
        if values.ndim == 1:
            return values
        if values.ndim > 2:
            return values.tolist()
        # (2, 3) numbers are the lists from 0 to 3 and from 3 to 6
        ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pyarrow.ListArray.from_arrays(ends, values.ravel())

    arrays = {}
    for name, values in part.columns.items():
        try:
            arrays[name] = column(name, values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
            raise several_types(f"{name!r}: {clause(error)}") from None
    table = pyarrow.table(arrays)
    if part.before:
        common_schema([parquet.read_schema(part.before[0]), table.schema])
    parquet.write_table(table, path)


def common_schema(schemas: Sequence[Any]) -> Any:
    """The schema of the rows of all parts. A part of empty lists has no type for them, and a column of numbers may
    begin with whole ones.

    Raises:
        UsageError: A column has values of several types.
    """
    import pyarrow

    try:
        return pyarrow.unify_schemas(schemas, promote_options="permissive")
    except pyarrow.ArrowTypeError as error:
        raise several_types(error) from None


def several_types(problem: object) -> UsageError:
    """The error for a column that Parquet cannot hold."""
    return UsageError(
        f".parquet needs one type for each column: {problem}.",
        code="unknown-format",
        place="--out",
        remedy="Write .jsonl, or leave it out.",
    )


def join_parquet(parts: Sequence[Path], path: Path) -> None:
    """One file with the rows of all parts."""
    from pyarrow import parquet

    schema = common_schema([parquet.read_schema(part) for part in parts])
    with parquet.ParquetWriter(path, schema) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part).cast(schema))


def write_npy(part: PredictedRows, path: Path) -> None:
    """A part with the array of the only column."""
    import numpy as np

    arrays = list(part.columns.values())
    if len(arrays) != 1 or isinstance(arrays[0], list):
        raise UsageError(
            f".npy holds one column of numbers, and the task predicts {', '.join(part.columns)}.",
            code="unknown-format",
            place="--out",
            remedy="Write .parquet.",
        )
    with path.open("wb") as file:
        np.save(file, arrays[0], allow_pickle=False)


def join_npy(parts: Sequence[Path], path: Path) -> None:
    """One array with the rows of all parts, copied part by part.

    The file is not mapped: on a full disk, the system ends a process that writes to a mapped file, without an error.
    """
    import numpy as np

    arrays = [np.load(part, mmap_mode="r", allow_pickle=False) for part in parts]
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(arrays[0].dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for array in arrays:
            file.write(np.ascontiguousarray(array, arrays[0].dtype).tobytes())


class Format(NamedTuple):
    """A format of files of predictions.

    Attributes:
        write: Writes a part: ``write(part, path)``.
        join: Makes the file from its parts: ``join(parts, path)``.
    """

    write: Callable[[PredictedRows, Path], None]
    join: Callable[[Sequence[Path], Path], None]


PREDICTION_FORMATS = {
    ".csv": Format(write_csv, join_lines),
    ".jsonl": Format(write_jsonl, join_lines),
    ".parquet": Format(write_parquet, join_parquet),
    ".npy": Format(write_npy, join_npy),
}
"""Suffix -> format."""
