"""The file of predictions.

Complete chunks are kept beside it until the end, so that an interrupted job continues after the last one.

The parts are in the folder ``FILE.parts``, numbered. The suffix ``.last`` marks the last one. The file is made from the
parts in one step, so it is complete or absent, and it does not depend on interruptions.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastloop.cli.streams import has_reader
from fastloop.errors import UsageError
from fastloop.runtime import files

log = logging.getLogger("fastloop")

Columns = Mapping[str, Any]
"""Name -> a value for each row: a list, or an array of numbers, (rows, ...)."""


class PredictionOutput:
    """Predictions on their way to a file, or to stdout as JSON lines.

    Args:
        path: The file; None: stdout.
        job: Everything that determines the predictions, as JSON values. Parts of another job are removed. None: the job
            cannot be repeated.

    Raises:
        UsageError: The file's format is unknown, or a link is in the place of the parts.
    """

    def __init__(self, path: Path | None, job: Mapping[str, Any] | None) -> None:
        self.path, self.parts = path, list[Path]()
        if path is None:
            return
        if path.suffix not in FORMATS:
            raise UsageError(f"--out {path}: found the suffix {path.suffix!r}, expected one of: {', '.join(FORMATS)}.")
        self.folder, identity = path.with_name(f"{path.name}.parts"), json.dumps(job, sort_keys=True)
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise UsageError(
                f"--out {path}: {self.folder} is a link or a file, where the parts are kept. Remove it, or give "
                "another file."
            )
        files.check_links(self.folder)
        if (
            not (self.folder / "job.json").is_file()
            or job is None
            or (self.folder / "job.json").read_text(encoding="utf-8") != identity
        ):
            if self.folder.exists():
                log.info("%s: the parts of another job are removed", self.folder)
                shutil.rmtree(self.folder)
            self.folder.mkdir()
            files.write(self.folder / "job.json", identity, hidden=True)
        found = {path.name.partition(".")[0]: path for path in self.folder.glob("[0-9]*")}
        while (name := f"{len(self.parts):08}") in found:
            self.parts.append(found[name])

    @property
    def complete(self) -> bool:
        """Whether all parts are there."""
        return bool(self.parts) and self.parts[-1].suffix == ".last"

    def add(self, columns: Mapping[str, list[Any]], last: bool) -> None:
        """Write the predictions of the next chunk. Values that are tensors of one shape are written as arrays.

        Raises:
            SystemExit: The program that reads stdout has closed it, as ``head`` does. No more samples are predicted.
            UsageError: The format cannot hold these columns.
        """
        table = {name: as_array(values) for name, values in columns.items()}
        if self.path is None:
            sys.stdout.writelines(json_lines(table))
            sys.stdout.flush()
            if not has_reader():
                raise SystemExit(1)
            return
        part = self.folder / (f"{len(self.parts):08}" + ".last" * last)
        unfinished = self.folder / "unfinished"
        FORMATS[self.path.suffix].write(table, unfinished, not self.parts)
        unfinished.replace(part)
        self.parts.append(part)

    def finish(self) -> None:
        """Make the file from its parts, and remove them."""
        if self.path is None:
            return
        joined = self.folder / "joined"
        FORMATS[self.path.suffix].join(self.parts, joined)
        joined.replace(self.path)
        shutil.rmtree(self.folder)


def as_array(values: list[Any]) -> Any:
    """Tensors of one shape as an array, (rows, ...); a missing one is NaN. Other values stay a list."""
    import torch

    found = [value for value in values if isinstance(value, torch.Tensor)]
    if not found or len({(value.shape, value.dtype) for value in found}) > 1:
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
    if len(found) < len(values):
        if not found[0].is_floating_point():
            return [None if value is None else value.tolist() for value in values]
        missing = torch.full_like(found[0], float("nan"))
        found = [missing if value is None else value for value in values]
    return torch.stack(found).numpy()


def rows(columns: Columns) -> Iterator[dict[str, Any]]:
    """The rows of a table."""
    lists = [values if isinstance(values, list) else values.tolist() for values in columns.values()]
    for values in zip(*lists, strict=True):
        yield dict(zip(columns, values, strict=True))


def json_lines(columns: Columns) -> Iterator[str]:
    """One JSON object for each row."""
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in rows(columns))


def csv_lines(columns: Columns, header: bool) -> Iterator[str]:
    """Rows of cells; values that are lists are written as JSON."""
    line = io.StringIO(newline="")
    writer = csv.writer(line, lineterminator="\n")
    if header:
        writer.writerow(columns)
    for row in rows(columns):
        writer.writerow([json.dumps(value) if isinstance(value, list) else value for value in row.values()])
    yield line.getvalue()


def write_csv(columns: Columns, path: Path, first: bool) -> None:
    """A part with ``csv_lines``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(csv_lines(columns, header=first))


def write_jsonl(columns: Columns, path: Path, first: bool) -> None:
    """A part with ``json_lines``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(json_lines(columns))


def join_lines(parts: Sequence[Path], path: Path) -> None:
    """Put text files end to end."""
    with path.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)


def write_parquet(columns: Columns, path: Path, first: bool) -> None:
    """A part in Parquet. Rows of an array are lists of numbers."""
    import numpy as np
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    def column(values: Any) -> Any:
        if isinstance(values, list) or values.ndim == 1:
            return values
        if values.ndim > 2:
            return values.tolist()
        ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pyarrow.ListArray.from_arrays(ends, values.ravel())

    parquet.write_table(pyarrow.table({name: column(values) for name, values in columns.items()}), path)


def join_parquet(parts: Sequence[Path], path: Path) -> None:
    """One file with the rows of all parts."""
    import pyarrow
    from pyarrow import parquet

    # a part of empty lists has no type for them
    schema = pyarrow.unify_schemas([parquet.read_schema(part) for part in parts])
    with parquet.ParquetWriter(path, schema) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part).cast(schema))


def write_npy(columns: Columns, path: Path, first: bool) -> None:
    """A part with the array of the only column."""
    import numpy as np

    arrays = list(columns.values())
    if len(arrays) != 1 or isinstance(arrays[0], list):
        raise UsageError(
            f"--out: .npy holds one column of numbers, and the task predicts {', '.join(columns)}. Write .parquet."
        )
    with path.open("wb") as file:
        np.save(file, arrays[0], allow_pickle=False)


def join_npy(parts: Sequence[Path], path: Path) -> None:
    """One array with the rows of all parts, copied part by part."""
    import numpy as np

    arrays = [np.load(part, mmap_mode="r", allow_pickle=False) for part in parts]
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    joined = np.lib.format.open_memmap(path, mode="w+", dtype=arrays[0].dtype, shape=shape)
    start = 0
    for array in arrays:
        joined[start : start + len(array)] = array
        start += len(array)
    joined.flush()


class Format(NamedTuple):
    """A format of files of predictions.

    Attributes:
        write: Writes a part: ``write(columns, path, first)``; ``first``: it is the first part.
        join: Makes the file from its parts: ``join(parts, path)``.
    """

    write: Callable[[Columns, Path, bool], None]
    join: Callable[[Sequence[Path], Path], None]


FORMATS = {
    ".csv": Format(write_csv, join_lines),
    ".jsonl": Format(write_jsonl, join_lines),
    ".parquet": Format(write_parquet, join_parquet),
    ".npy": Format(write_npy, join_npy),
}
"""Suffix -> format."""
