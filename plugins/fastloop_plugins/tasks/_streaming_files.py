"""Row groups of Parquet and JSONL files, local or at a URL of fsspec: found, counted, and read one by one."""

from __future__ import annotations

import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from fastloop.errors import DataError, RecipeError
from fastloop_plugins.tasks._text_files import Part, format_of, missing_column
from fastloop_plugins.tasks._text_paths import URL, find_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop.recipe import Recipe

FORMATS = (".parquet", ".jsonl")
LINES = 1024
"""Rows of a row group of a JSONL file, which has none of its own."""
BATCH = 256
"""Rows that are decoded at once from a Parquet file: a row group may be larger than memory."""
OPEN = 32
"""Files that one reader keeps open."""
LABELS = 10_000
"""Different labels at most. A column with more of them holds no classes."""


def find_shards(recipe: Recipe, given: str | list[str], where: str) -> list[list[str]]:
    """The files of each entry of ``data.files.train``: paths and patterns, local or as URLs of fsspec.

    Raises:
        RecipeError: An entry matches no file, or a file has a format that is not streamed.
    """
    found = []
    for item in [given] if isinstance(given, str) else given:
        if URL.match(item) and not item.startswith(("file://", "http")):
            paths = _remote(item, where)
        else:
            paths = [str(path) for path in find_files(recipe, item, "train", where)]
        for path in paths:
            suffix, codec = format_of(Path(path))
            if suffix not in FORMATS or codec is not None:
                raise RecipeError(
                    f"{where}: {path}: cannot be streamed. Expected files of type {' or '.join(FORMATS)}, not compressed as a whole. "
                    "Convert it to Parquet, or remove data.streaming."
                )
        found.append(paths)
    if not found:
        raise RecipeError(f"{where}: found an empty list, expected files.")
    return found


def _remote(url: str, where: str) -> list[str]:
    import fsspec  # type: ignore[import-untyped]

    try:
        system, path = fsspec.core.url_to_fs(url)
        paths = sorted(system.glob(path)) if re.search(r"[*?\[]", path) else [path] * system.isfile(path)
    except (ImportError, OSError, ValueError) as error:
        raise RecipeError(f"{where}: {url}: cannot be listed: {error}.") from None
    if not paths:
        raise RecipeError(f"{where}: no file matches {url}.")
    return [system.unstrip_protocol(path) for path in paths]


def open_file(path: str) -> BinaryIO:
    """Open a file at a path or a URL of fsspec."""
    if not URL.match(path):
        return Path(path).open("rb")
    import fsspec

    return cast("BinaryIO", fsspec.open(path, "rb").open())


class NamedPart(Part):
    """Rows from several files. Messages name each one by ``names``."""

    names: Sequence[str] = ()

    def row(self, number: int) -> str:
        return self.names[number - 1]


@dataclass
class Index:
    """The row groups of some files, in the files' order.

    Attributes:
        file: (row groups,) number of the file of each.
        key: (row groups,) its number in a Parquet file, or its offset in bytes in a JSONL file.
        rows: (row groups,) its rows.
        labels: Label -> its rows and the first of them.
        facts: Facts about each file that change with its rows.
    """

    paths: list[str]
    file: NDArray[np.int64]
    key: NDArray[np.int64]
    rows: NDArray[np.int64]
    labels: dict[Any, list[int]] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.firsts = np.cumsum(self.rows) - self.rows

    def group_of(self, row: int) -> int:
        """The row group of a row."""
        return int(np.searchsorted(self.firsts, row, side="right")) - 1

    def name(self, row: int) -> str:
        """The name of a row in messages."""
        group = self.group_of(row)
        before = int(self.firsts[np.searchsorted(self.file, self.file[group])])
        return f"{self.paths[self.file[group]]}, row {row - before + 1}"


def read_index(paths: Sequence[str], columns: dict[str, str], label: str | None) -> Index:
    """Count the rows of files: from the metadata of Parquet files, and by reading JSONL files.

    Args:
        columns: Column -> the option of ``data`` that names it.
        label: The column whose values to count; None: none.

    Raises:
        RecipeError: A file has no rows or not these columns, cannot be read, or has too many labels.
    """
    groups: list[tuple[int, int, int]] = []
    labels: dict[Any, list[int]] = {}
    facts: list[str] = []
    total = 0
    for number, path in enumerate(paths):
        scan = _scan_parquet if path.endswith(".parquet") else _scan_lines
        start = total
        try:
            for key, rows, values in scan(path, columns, label, facts):
                for row, value in enumerate(values, total):
                    labels.setdefault(value, [0, row])[0] += 1
                groups.append((number, key, rows))
                total += rows
                if len(labels) > LABELS:
                    raise RecipeError(f"{path}: column {label!r} (data.label) has more than {LABELS} different labels, expected few.")
        except (OSError, ValueError, TypeError) as error:  # pyarrow's errors are among them
            raise RecipeError(f"{path}: cannot be read as {format_of(Path(path))[0]}: {str(error).splitlines()[0]}.") from None
        if total == start:
            raise RecipeError(f"{path}: has no rows. Remove it from data.files.train.")
    file, key, rows = np.array(groups, np.int64).T
    return Index(list(paths), file, key, rows, labels, facts)


def _scan_parquet(path: str, columns: dict[str, str], label: str | None, facts: list[str]) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield number, rows and labels of each row group."""
    with _parquet(path) as file:
        for name, key in columns.items():
            if name not in file.schema_arrow.names:
                raise missing_column(path, key, name, file.schema_arrow.names)
        metadata = file.metadata
        for number in range(metadata.num_row_groups):
            group, values = metadata.row_group(number), []
            facts.append(f"{group.num_rows} {group.total_byte_size}")
            if label is not None:
                values = [
                    value for batch in file.iter_batches(row_groups=[number], columns=[label]) for value in batch.column(0).to_pylist()
                ]
            if group.num_rows:
                yield number, group.num_rows, values


def _scan_lines(path: str, columns: dict[str, str], label: str | None, facts: list[str]) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield offset, rows and labels of each group of lines."""
    offset, start, rows, hashed = 0, 0, 0, 0
    values: list[Any] = []
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                if not rows:
                    start = offset
                if offset == 0 or label is not None:
                    row = _parse(path, f"line {number}", line)
                    for name, key in columns.items() if offset == 0 else ():
                        if name not in row:
                            raise missing_column(path, key, name, row)
                    if label is not None:
                        values.append(row.get(label))
                rows += 1
            offset, hashed = offset + len(line), zlib.crc32(line, hashed)
            if rows == LINES:
                yield start, rows, values
                rows, values = 0, []
    facts.append(f"{offset} {hashed}")
    if rows:
        yield start, rows, values


def _parse(path: str, where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{path}, {where}: not valid JSON: {error}.") from None
    if not isinstance(row, dict):
        raise RecipeError(f"{path}, {where}: found {type(row).__name__}, expected an object with a key for each column.")
    return row


def _parquet(path: str) -> Any:
    from pyarrow import parquet  # type: ignore[import-untyped]

    return parquet.ParquetFile(open_file(path) if URL.match(path) else path, buffer_size=2**20, pre_buffer=False)


class Reader:
    """Reads row groups, and keeps the last files open.

    Attributes:
        rows_read: Rows decoded so far.
    """

    def __init__(self, index: Index, columns: Sequence[str]) -> None:
        self.index, self.columns, self.rows_read = index, list(columns), 0
        self.open: OrderedDict[int, Any] = OrderedDict()

    def read(self, group: int, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yield the columns of each row of a row group, without its first ``skip`` rows.

        Raises:
            DataError: The file was changed, or cannot be read.
        """
        number, key = int(self.index.file[group]), int(self.index.key[group])
        path, rows, count = self.index.paths[number], int(self.index.rows[group]), 0
        reading = self._read_parquet(number, key) if path.endswith(".parquet") else self._read_lines(number, key, rows)
        try:
            for values in reading:
                self.rows_read, count = self.rows_read + 1, count + 1
                if count > skip:
                    yield values
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path}: row group at {key} cannot be read: {error}") from error
        if count != rows:
            raise DataError(f"{path}: its row group at {key} has {count} rows, and had {rows} when the run started. Start it again.")

    def close(self) -> None:
        """Close the files."""
        for file in self.open.values():
            file.close()
        self.open.clear()

    def _file(self, number: int) -> Any:
        if number not in self.open:
            path = self.index.paths[number]
            self.open[number] = _parquet(path) if path.endswith(".parquet") else open_file(path)
            if len(self.open) > OPEN:
                evicted, file = self.open.popitem(last=False)
                if not self.index.paths[evicted].endswith(".parquet"):  # which another lane may still read
                    file.close()
        self.open.move_to_end(number)
        return self.open[number]

    def _read_parquet(self, number: int, key: int) -> Iterator[tuple[Any, ...]]:
        for batch in self._file(number).iter_batches(BATCH, row_groups=[key], columns=self.columns):
            yield from zip(*(batch.column(name).to_pylist() for name in self.columns), strict=True)

    def _read_lines(self, number: int, offset: int, rows: int) -> Iterator[tuple[Any, ...]]:
        left = rows
        while left:  # other row groups may move the file's position between two batches
            file = self._file(number)
            file.seek(offset)
            lines = list(islice(file, min(left, BATCH)))
            if not lines:
                return
            offset += sum(map(len, lines))
            for line in lines:
                if not line.isspace():
                    left -= 1
                    row = _parse(self.index.paths[number], "a row", line)
                    yield tuple(row.get(name) for name in self.columns)
