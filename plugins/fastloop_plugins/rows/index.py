"""Row groups of streamed files, local or at a URL of fsspec: found, counted, and read one by one."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyarrow import ArrowException

from fastloop.errors import DataError, RecipeError
from fastloop.problem import clause, counted
from fastloop_plugins import _cache
from fastloop_plugins.rows.content_hashes import FileState, state_of
from fastloop_plugins.rows.features import StreamedNames
from fastloop_plugins.rows.file import BadRow, Block, File
from fastloop_plugins.rows.formats import ROWS_AT_ONCE, FileLayout, explain_reading
from fastloop_plugins.rows.kept_results import kept_entry
from fastloop_plugins.rows.paths import URL, find_files
from fastloop_plugins.rows.remote import RemoteError, find_remote_files
from fastloop_plugins.rows.suffixes import ARCHIVES, COLUMN_FORMATS, COMPRESSIONS, format_of
from fastloop_plugins.rows.table import show

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop.recipe import Recipe

Row = tuple[Any, ...]
OPEN = 32
"""Files that one reader keeps open."""
GROUP = 1024
"""Rows of a row group of a file that has none of its own: some hundred KB of text."""
LABELS = 10_000
"""Different labels at most. A column with more of them holds no classes."""


def find_shards(recipe: Recipe, entries: str | list[str], where: str, formats: Sequence[str]) -> list[list[str]]:
    """The files of each entry of ``data.files.train``: paths and patterns, local or as URLs of fsspec.

    Args:
        entries: A path or pattern, or a list of them.
        formats: The suffixes that the task reads.

    Raises:
        RecipeError: An entry matches no file, or a file has a format that is not streamed.
    """
    if isinstance(entries, str):
        entries = [entries]
    shards = []
    for item in entries:
        if URL.match(item) and not item.startswith("file://"):
            paths = find_remote_files(item, where)
        else:
            paths = [str(path) for path in find_files(recipe, item, "train", where, formats)]
        problem = unstreamed(paths, formats)
        if problem:
            raise RecipeError(
                f"{problem} Convert it to Parquet, or remove data.streaming.", code="no-streaming", place=where
            )
        shards.append(paths)
    if not shards:
        raise RecipeError(code="missing-value", place=where, found="an empty list", expected="files")
    return shards


def unstreamed(paths: Sequence[str], formats: Sequence[str]) -> str:
    """The problem of the first file with a format that is not streamed; empty if there is none."""
    for path in paths:
        suffix, codec = format_of(Path(path))
        if suffix not in formats or (codec is not None and suffix in COLUMN_FORMATS):
            return (
                f"{path}: cannot be streamed. Expected files of type {', '.join(formats)}, and lines also with "
                f"{', '.join(COMPRESSIONS)} behind it.{ARCHIVES.get(suffix, '')}"
            )
    return ""


@dataclass(frozen=True)
class RowName:
    """The name of a row in messages. It is found when it is shown: that may read a part of the file."""

    index: Index
    row: int

    def __str__(self) -> str:
        return self.index.describe(self.row)


@dataclass
class Index:
    """The row groups of some files, in the files' order.

    Attributes:
        file: (row groups,) number of the file of each.
        key: (row groups,) its number in a Parquet file, or the offset in bytes of its first row in a file of lines.
        rows: (row groups,) its rows.
        labels: Label -> its rows.
        facts: Facts about each file that change with its rows.
        dropped: Rows that each condition of ``data.drop`` leaves out. The other attributes count the rest.
        class_names: Column -> the names of its numbers, for each column of which the files have them.
        lines: (row groups,) the line of the first row of each, 0 in a format without lines.
        layout: How the files are read; None: a row of the index is no row of a file.
        states: The state of each file before it was indexed; None: it is at a URL.
    """

    paths: list[str]
    file: NDArray[np.int64]
    key: NDArray[np.int64]
    rows: NDArray[np.int64]
    labels: dict[Any, RowsOfLabel] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    lines: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layout: FileLayout | None = None
    class_names: dict[str, list[str]] = field(default_factory=dict)
    states: list[FileState | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.firsts = np.cumsum(self.rows) - self.rows

    def group_of(self, row: int) -> int:
        """The row group of a row."""
        return int(np.searchsorted(self.firsts, row, side="right")) - 1

    def name(self, row: int) -> RowName:
        """The name of a row in messages."""
        return RowName(self, row)

    def describe(self, row: int) -> str:
        """The file of a row and its line, or its number in a format without lines."""
        group = self.group_of(row)
        line = self._find_line(group, row - int(self.firsts[group]))
        if line is not None:
            return f"{self.paths[self.file[group]]}, line {line}"
        # the rows before the first row group of the file: with files [0 0 1 1] and firsts [0 4 8 12], those of file 1
        # begin with row 8, and row 13 is its sixth
        first_group = np.searchsorted(self.file, self.file[group])
        number = row - int(self.firsts[first_group]) + 1
        if any(self.dropped):
            return f"{self.paths[self.file[group]]}, row {number} of those kept"
        return f"{self.paths[self.file[group]]}, row {number}"

    def _find_line(self, group: int, offset: int) -> int | None:
        """The line of a row of a row group, which may be one that cannot be read. None: it is not known."""
        if self.layout is None or not self.lines[group]:
            return None
        line = int(self.lines[group])
        if offset == 0:
            return line
        layout = self.layout.of_file(int(self.file[group]))
        first = 0  # the line of the first row, counted from the start of the group
        rows_before = 0  # rows of the blocks that were read
        try:
            with layout.open(self.paths[self.file[group]]) as file:
                for block in layout.drop.blocks(file, (), int(self.key[group]), ROWS_AT_ONCE):
                    if not block.lines:
                        continue
                    first = first or block.lines[0]
                    # a group whose first row is line 100 of the file: its row on line 7 of the group, where the first
                    # one is on line 1, is line 106
                    if offset < rows_before + block.rows:
                        return line + block.lines[offset - rows_before] - first
                    rows_before += block.rows
        except BadRow as error:
            match = re.fullmatch(r"line (\d+)", error.place)
            if match is not None and rows_before == offset:
                return line + int(match[1]) - first
        except (OSError, ValueError, RecipeError, ArrowException):
            pass  # the file was changed
        return None


def read_index(paths: Sequence[str], layout: FileLayout, label: str | None, lists: bool = False) -> Index:
    """Count the rows of files: from the metadata of Parquet files, and by reading other files. ``token-cache`` keeps
    the result.

    Args:
        label: The column whose values to count; None: none.
        lists: Count the elements of lists in that column.

    Raises:
        RecipeError: A file has no rows or not these columns, cannot be read, or has too many labels.
    """
    states = [_local_state(path) for path in paths]  # before the files are read
    about = [*layout.columns, str(label), str(lists), str(layout.how), str(layout.drop), str(layout.names)]
    entry = kept_entry(["index with names of classes", *about], paths)
    saved = None if entry is None else _read_kept(entry, paths, layout)
    if saved is not None:
        saved.states = states
        return saved
    index = _scan(paths, layout, label, lists)
    index.states = states
    if entry is not None and all(isinstance(value, str | int | float | None) for value in index.labels):
        content = {
            "groups": [array.tolist() for array in (index.file, index.key, index.rows, index.lines)],
            "labels": [[value, own.rows, own.first] for value, own in index.labels.items()],
            "facts": index.facts,
            "dropped": index.dropped,
            "class_names": index.class_names,
        }
        with _cache.written(entry) as folder:
            (folder / "index.json").write_text(json.dumps(content), encoding="utf-8")
    return index


def _read_kept(entry: Path, paths: Sequence[str], layout: FileLayout) -> Index | None:
    """The index that ``read_index`` kept in an entry of the cache; None if it is missing or damaged."""
    if not (entry / "index.json").is_file():
        return None
    try:
        content = json.loads((entry / "index.json").read_text(encoding="utf-8"))
        file, key, rows, lines = np.array(content["groups"], np.int64)
        labels = {value: RowsOfLabel(count, row) for value, count, row in content["labels"]}
        names = content["class_names"]
        return Index(list(paths), file, key, rows, labels, content["facts"], content["dropped"], lines, layout, names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _cache.remove_damaged(entry, error, "the rows are counted again", "data")
        return None


@dataclass(slots=True)
class RowsOfLabel:
    """The rows that have a label.

    Attributes:
        rows: Number of rows.
        first: The number of the first one, counted over all files.
    """

    rows: int
    first: int


class LabelCounts:
    """Counts the labels of streamed rows.

    Attributes:
        counts: Those of all labels but true and false, which are the keys 1 and 0 in a dict.
        switches: Those of true and false.
    """

    def __init__(self) -> None:
        self.counts = dict[Any, RowsOfLabel]()
        self.switches = dict[bool, RowsOfLabel]()

    def add(self, label: Any, row: int) -> None:
        """Add the label of a row.

        Raises:
            TypeError: It cannot be counted, such as a list.
        """
        if isinstance(label, float) and math.isnan(label):
            label = math.nan  # one key for all of them: a NaN equals no other
        counts: dict[Any, RowsOfLabel] = self.switches if isinstance(label, bool) else self.counts
        own = counts.get(label)
        if own is None:
            counts[label] = RowsOfLabel(1, row)
        else:
            own.rows += 1

    def all(self, index: Index, column: str) -> dict[Any, RowsOfLabel]:
        """The labels of the rows of an index.

        Raises:
            RecipeError: Some are true or false, and others 1 or 0.
        """
        for switch, own in self.switches.items():
            if switch in self.counts:
                raise RecipeError(
                    f"column {column!r} (data.label) mixes booleans and numbers: it holds {switch}, and "
                    f"{index.name(self.counts[switch].first)} holds {int(switch)}.",
                    code="mixed-labels",
                    place=str(index.name(own.first)),
                    remedy="Write all one way.",
                )
        return self.counts | self.switches


def _labels_of(block: Block, column: Sequence[str], lists: bool) -> Iterator[tuple[int, Any]]:
    """Yield the labels of a block, each with the number of its row in it.

    Args:
        column: The column of labels; empty: there is none.
        lists: Whether a list holds several labels. Otherwise it is one label, which is wrong.
    """
    if not column:
        return
    for row, (value,) in enumerate(block.tuples(column)):
        if lists and isinstance(value, list):
            for label in value:
                yield row, label
        else:
            yield row, value


def _scan(paths: Sequence[str], layout: FileLayout, label: str | None, lists: bool) -> Index:
    groups: list[list[int]] = []  # number of the file, position, rows, and line of the first row
    labels = LabelCounts()
    facts = [str(layout.drop)] if layout.drop.conditions else []
    dropped = [0] * len(layout.drop.conditions)
    names = StreamedNames()
    total = 0
    for number, path in enumerate(paths):
        start = total
        part = layout.of_file(number)
        counted = part.own_names([] if label is None else [label])
        with explain_reading(path, layout.how), part.open(path) as file:
            if file.not_streamed:
                raise RecipeError(f"cannot be streamed: {file.not_streamed}", code="no-streaming", place=str(path))
            names.add(path, part.class_names(file))
            for block in part.drop.blocks(file, counted, 0, GROUP, counts=dropped):
                if total == start:
                    part.check(file)
                for row, value in _labels_of(block, counted, lists):
                    try:
                        labels.add(value, total + row)
                    except TypeError:
                        raise RecipeError(
                            f"column {label!r} (data.label) holds {show(value)}, expected text, or whole numbers "
                            "from 0.",
                            code="wrong-label",
                            place=_place_in_block(path, block, row, total - start),
                        ) from None
                if groups and groups[-1][:2] == [number, block.start]:
                    groups[-1][2] += block.rows
                elif block.rows:
                    first_line = block.lines[0] if block.lines else 0
                    groups.append([number, block.start, block.rows, first_line])
                total += block.rows
                if len(labels.counts) > LABELS:
                    raise RecipeError(
                        f"column {label!r} (data.label) has more than {LABELS} different labels, expected few.",
                        code="too-many-labels",
                        place=str(path),
                        remedy="For regression: data.label_type=number." if str(value).isdecimal() else "",
                    )
            facts += file.facts()
        if total == start and any(dropped):
            raise RecipeError(
                "has no rows that data.drop keeps.",
                code="empty-file",
                place=str(path),
                remedy="Remove it from data.files.train.",
            )
        if total == start:
            raise RecipeError(
                "has no rows.", code="empty-file", place=str(path), remedy="Remove it from data.files.train."
            )
    files, keys, rows, lines = np.array(groups, np.int64).T
    index = Index(list(paths), files, keys, rows, {}, facts, dropped, lines, layout, names.of_column)
    index.labels = labels.all(index, str(label))
    return index


def _place_in_block(path: str, block: Block, row: int, before: int) -> str:
    """The name of a row of a block in messages.

    Args:
        before: Rows of the file before the block.
    """
    if block.lines is None:
        return f"{path}, row {before + row + 1}"
    return f"{path}, line {block.lines[row]}"


def _local_state(path: str) -> FileState | None:
    """The state of a file; None: it is at a URL, or cannot be found, which reading it reports."""
    if URL.match(path):
        return None
    with suppress(OSError):
        return state_of(Path(path))
    return None


class Reader:
    """Reads row groups, and keeps the last files open.

    Attributes:
        rows_read: Rows read so far, with those that were skipped in their row group.
    """

    def __init__(self, index: Index, layout: FileLayout, columns: Sequence[str]) -> None:
        self.index = index
        self.layout = layout
        self.columns = list(columns)
        self.rows_read = 0
        self.open: OrderedDict[int, File] = OrderedDict()

    def read(self, group: int, skip: int) -> Iterator[Row]:
        """Yield the columns of each row of a row group, without its first ``skip`` rows.

        Raises:
            DataError: The file was changed, or cannot be read.
        """
        number = int(self.index.file[group])
        key = int(self.index.key[group])
        rows = int(self.index.rows[group])
        count = skip
        self.rows_read += skip
        with self._explaining(group):
            self._check_unchanged(number)
            file = self._file(number)
            layout = self.layout.of_file(number)
            columns = layout.own_names(self.columns)
            for block in layout.drop.blocks(file, columns, key, ROWS_AT_ONCE, skip):
                self._check_unchanged(number)  # after its rows were read
                if file.has_groups and block.start != key:
                    break
                for values in islice(block.tuples(columns), rows - count):
                    self.rows_read += 1
                    count += 1
                    yield values
                if count == rows:
                    return
        raise DataError(
            f"its row group at {key} has {counted(count, 'row')}, and had {rows} when the run started.",
            code="data-changed",
            place=str(self.index.paths[number]),
            remedy="Start it again.",
        )

    def _check_unchanged(self, number: int) -> None:
        """Check that a local file was not written since it was indexed. Its numbers of rows may be the same.

        Raises:
            DataError: It was written or replaced.
            OSError: It cannot be found.
        """
        indexed = self.index.states[number]
        path = self.index.paths[number]
        if indexed is not None and state_of(Path(path)).was_written_since(indexed):
            raise DataError(
                "the file was written or replaced since the run started, so its rows may be others.",
                code="data-changed",
                place=str(path),
                remedy="Resume the run, which compares the rows with those of its checkpoint, or start it again.",
            )

    @contextmanager
    def _explaining(self, group: int) -> Iterator[None]:
        """Raise errors of reading a row group inside the block as a ``DataError``, which names the file or the row."""
        key = int(self.index.key[group])
        path = self.index.paths[int(self.index.file[group])]
        try:
            yield
        except BadRow as error:
            row = int(self.index.firsts[group]) + error.before
            raise DataError(str(error), code="invalid-row", place=str(self.index.name(row))) from None
        except RemoteError as error:
            raise DataError(
                f"a row group cannot be read: {clause(error)}.",
                code="unreachable-url",
                place=str(path),
                remedy="Resume the run when the server answers again.",
            ) from None
        except UnicodeDecodeError as error:  # reading Parquet does not validate its text
            raise DataError(
                f"row group at {key} has text that is not UTF-8 ({error.reason}).",
                code="wrong-encoding",
                place=str(path),
                remedy="Write it again as UTF-8.",
            ) from None
        except (OSError, ValueError, TypeError, ArrowException) as error:
            raise DataError(
                f"row group at {key} cannot be read: {clause(error)}. The file is damaged, or was changed: write "
                "it again.",
                code="file-unreadable",
                place=str(path),
            ) from None

    def close(self) -> None:
        """Close the files."""
        for file in self.open.values():
            file.close()
        self.open.clear()

    def _file(self, number: int) -> File:
        """An open file. One that leaves ``open`` is closed when no lane reads it anymore."""
        if number not in self.open:
            self.open[number] = self.layout.of_file(number).open(self.index.paths[number])
            if len(self.open) > OPEN:
                self.open.popitem(last=False)
        self.open.move_to_end(number)
        return self.open[number]
