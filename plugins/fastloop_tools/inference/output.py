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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastloop.cli.streams import has_reader
from fastloop.errors import UsageError
from fastloop.runtime import files

log = logging.getLogger("fastloop")

FORMATS = (".csv", ".jsonl", ".parquet")

Columns = Mapping[str, list[Any]]


class Output:
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

    def add(self, columns: Columns, last: bool) -> None:
        """Write the predictions of the next chunk.

        Raises:
            SystemExit: The program that reads stdout has closed it, as ``head`` does. No more samples are predicted.
        """
        if self.path is None:
            sys.stdout.writelines(json_lines(columns))
            sys.stdout.flush()
            if not has_reader():
                raise SystemExit(1)
            return
        part = self.folder / (f"{len(self.parts):08}" + ".last" * last)
        unfinished = self.folder / "unfinished"
        if self.path.suffix == ".parquet":
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(dict(columns)), unfinished)
        else:
            lines = json_lines(columns) if self.path.suffix == ".jsonl" else csv_lines(columns, header=not self.parts)
            with unfinished.open("w", encoding="utf-8", newline="") as file:
                file.writelines(lines)
        unfinished.replace(part)
        self.parts.append(part)

    def finish(self) -> None:
        """Make the file from its parts, and remove them."""
        if self.path is None:
            return
        joined = self.folder / "joined"
        if self.path.suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            # a part of empty lists has no type for them
            schema = pyarrow.unify_schemas([parquet.read_schema(part) for part in self.parts])
            with parquet.ParquetWriter(joined, schema) as writer:
                for part in self.parts:
                    writer.write_table(parquet.read_table(part).cast(schema))
        else:
            with joined.open("wb") as target:
                for part in self.parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, target)
        joined.replace(self.path)
        shutil.rmtree(self.folder)


def rows(columns: Columns) -> Iterator[dict[str, Any]]:
    """The rows of a table."""
    for values in zip(*columns.values(), strict=True):
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
