"""Reads rows for the text tasks: from csv, tsv, json, jsonl, parquet and txt files, and from Python objects."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastloop import option
from fastloop.errors import RecipeError, did_you_mean
from fastloop_plugins.tasks._bounds import BoundedText, Expanded

FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Suffix after that of the format -> codec, by pyarrow's name."""
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes that no text file starts with -> codec. A bz2 file starts with letters, so only its suffix identifies
it."""
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte-order mark -> encoding."""


@dataclass(kw_only=True)
class Read:
    """``data.read``: options for reading files whose names and first bytes do not determine them."""

    delimiter: Annotated[str | None, option("Character between cells of .csv and .tsv files; tab for a tab.")] = None
    columns: Annotated[
        list[str] | None, option("Names of the columns of .csv and .tsv files without a header line.")
    ] = None
    encoding: Annotated[str | None, option("Encoding of text files without a byte-order mark; null: utf-8.")] = None
    quoting: Annotated[
        Literal["double", "none"] | None,
        option(
            "double: quoted cells may span lines, with doubled quotes; none: quotes are text; null: double, an error "
            "if in doubt."
        ),
    ] = None
    compression: Annotated[
        Literal["gzip", "bz2", "zstd", "none"] | None, option("null: by suffix and first bytes.")
    ] = None
    blank_lines: Annotated[bool, option("Read each .txt file as one text, with its blank lines and line ends.")] = False
    max_row_mib: Annotated[
        int, option("MiB of a row at most: a line, the lines of a quoted cell, or a file in a .tar.", ge=1)
    ] = 16
    max_expansion: Annotated[
        int,
        option(
            "Times its size that a compressed or Parquet file may expand to; one row of max_row_mib always may.", ge=1
        ),
    ] = 50

    def __post_init__(self) -> None:
        if self.delimiter in ("tab", "\\t"):
            self.delimiter = "\t"
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter: found {self.delimiter!r}, expected one character, such as ; or tab.")
        if self.columns is not None and (not self.columns or len(set(self.columns)) < len(self.columns)):
            raise ValueError(f"columns: found {self.columns}, expected a name for each column, each name once.")
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=self.encoding)
        except (LookupError, ValueError):
            raise ValueError(
                f"encoding: found {self.encoding!r}, expected a text encoding of Python, such as cp1252."
            ) from None


@dataclass
class Part:
    """Rows from one source, stored by column."""

    where: str
    columns: Mapping[str, Any]  # name -> list, or pyarrow column
    classes: list[str] | None = None  # names of the labels, if the dataset's features define them
    unreadable: int = 0  # skipped rows that could not be read
    untyped: bool = False  # whether every cell is text: a label 1 is then '1'
    notes: list[str] = field(default_factory=list)  # what was detected, for the log
    numbers: Sequence[int] | None = None  # of the rows in the source, if some are left out

    def column(self, key: str, name: str) -> list[Any]:
        """The values of the column that ``data.<key>`` names."""
        if name not in self.columns:
            raise missing_column(self.where, key, name, self.columns)
        values = self.columns[name]
        try:
            return values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        except UnicodeDecodeError as error:  # reading parquet does not validate its text
            raise RecipeError(
                f"{self.where}: the column {name!r}, which data.{key} names, is not UTF-8 ({error.reason})."
            ) from None

    def row(self, number: int) -> str:
        """The name of a row in messages; the first row is 1."""
        return f"{self.where}, row {number if self.numbers is None else self.numbers[number - 1]}"

    def keep(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> Part:
        """A part of some rows, numbered from 0, with these columns. Messages still name each row by its number in the
        source."""
        kept = {name: [values[row] for row in rows] for name, values in columns.items()}
        before = self.numbers if self.numbers is not None else range(1, 1 + max(map(len, columns.values()), default=0))
        return replace(self, columns=kept, unreadable=0, numbers=[before[row] for row in rows])


def missing_column(where: str, key: str, name: str, columns: Iterable[Any], remedy: str = "") -> RecipeError:
    """The error for a missing column that ``data.<key>`` names."""
    names = [str(column) for column in columns]
    remedy = remedy or did_you_mean(name, names).partition(" Expected")[0]
    return RecipeError(
        f"{where}: there is no column {name!r}, which data.{key} names. Its columns: "
        f"{', '.join(names) or 'none'}.{remedy}"
    )


def check_names(where: str, names: Iterable[str]) -> None:
    """Raise an error for a repeated column name. Empty names may repeat: trailing commas of spreadsheets give them."""
    names = list(names)
    for name in names:
        if name and names.count(name) > 1:
            raise RecipeError(
                f"{where}: the column name {name!r} is repeated in: {', '.join(names)}. Rename or remove one of them."
            )


def show(value: Any) -> str:
    """A value for a message: shortened, with its type."""
    try:
        return f"{value!r:.60} ({type(value).__name__})"
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def make_part(where: str, rows: Any, label: str | None = None) -> Part:
    """Convert a ``datasets.Dataset`` or a list of mappings to a part."""
    if hasattr(rows, "with_format"):
        table, feature = rows.with_format("arrow")[:], rows.features.get(label)
        return Part(
            where,
            dict(zip(table.column_names, table.columns, strict=True)),
            getattr(getattr(feature, "feature", feature), "names", None),
        )
    rows = list(rows)
    columns: dict[str, None] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise RecipeError(f"{where}, row {number}: found {show(row)}, expected a mapping of columns.")
        columns |= dict.fromkeys(row)
    return Part(where, {name: [row.get(name) for row in rows] for name in columns})


# -- files -------------------------------------------------------------------------------------------------------------


def format_of(path: Path) -> tuple[str, str | None]:
    """The suffix of the format, such as ``.csv``, and the codec of a suffix after it, if any."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    codec = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    suffix = "".join(suffixes[-1:] if codec is None else suffixes[-2:-1])
    return suffix, codec if suffix != ".parquet" else None


def read_file(
    path: Path, how: Read, text: Mapping[str, str], labels: Sequence[str] = (), skip_unreadable: bool = False
) -> Part:
    """Read the rows of one file, without a cache of converted copies. A cell with NA is the text NA.

    Args:
        how: ``data.read``.
        text: Column of texts -> the option of ``data`` that names it.
        labels: The columns of labels.
        skip_unreadable: Skip malformed rows of csv, tsv and jsonl files, and count them.

    Raises:
        RecipeError: The file cannot be read in the format of its suffix, with the options in ``how``.
    """
    with explain_reading(path, how):
        return _read_as(path, format_of(path)[0], how, text, labels, skip_unreadable)


@contextmanager
def explain_reading(path: Path, how: Read) -> Iterator[None]:
    """Raise errors of reading a file inside the block as errors that name the file, and the line if it is known.

    Raises:
        RecipeError: The file cannot be read in the format of its suffix, with the options in ``how``.
    """
    import pyarrow  # type: ignore[import-untyped]

    try:
        yield
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from None
    except UnicodeError as error:
        raise _undecodable(path, how, error) from None
    except (OSError, pyarrow.ArrowException) as error:
        codec = _codec(path, how)
        remedy = f" It is read as {codec}: if it has another compression, give data.read.compression." if codec else ""
        raise RecipeError(f"{path}: cannot be read as {format_of(path)[0]}: {first_line(error)}.{remedy}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a period at its end."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _read_as(
    path: Path, suffix: str, how: Read, text: Mapping[str, str], labels: Sequence[str], skip_unreadable: bool
) -> Part:
    if suffix in (".csv", ".tsv"):
        from fastloop_plugins.tasks._text_csv import read_delimited

        return read_delimited(path, how, text, labels, skip_unreadable)
    if suffix == ".parquet":
        import pyarrow

        from fastloop_plugins.tasks._parquet_bounds import BoundedParquet

        with BoundedParquet(pyarrow.OSFile(str(path)), str(path), how) as file:
            check_names(str(path), file.names)
            batches = list(file.batches(file.names))
            table = pyarrow.Table.from_batches(batches) if batches else file.file.schema_arrow.empty_table()
        return Part(str(path), dict(zip(table.column_names, table.columns, strict=True)))
    with open_text(path, how) as stream:
        is_list = suffix != ".txt" and stream.head.lstrip().startswith("[")  # it may be one long line
        content = stream.read() if is_list else "".join(stream)
    if suffix == ".txt" and how.blank_lines:
        return Part(str(path), {next(iter(text)): [content] if content.strip() else []})
    content = re.sub("\r\n?", "\n", content)
    if suffix == ".txt":
        return _read_plain(path, content, next(iter(text)))
    without_rows = Part(str(path), {name: [] for name in text})
    if content.lstrip().startswith("["):
        return make_part(str(path), listed) if (listed := parse_json(path, 1, content)) else without_rows
    rows, broken = [], 0
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                rows.append(parse_json(path, number, line))
            except (RecipeError, json.JSONDecodeError) as error:
                if not skip_unreadable:
                    if isinstance(error, RecipeError):
                        raise
                    raise json.JSONDecodeError(error.msg, "\n" * (number - 1) + line, number - 1) from None
                broken += 1
    part = make_part(str(path), rows) if rows else without_rows
    part.unreadable = broken
    return part


def _read_plain(path: Path, content: str, column: str) -> Part:
    """Paragraphs, or lines if there are no paragraphs."""
    found = re.search(r"\S\s*\n\s*\n\s*\S", content)
    content = content.strip("\n")
    blocks = [block for block in (re.split(r"\n\s*\n", content) if found else content.split("\n")) if block.strip()]
    note = f"{path}: read as {len(blocks)} {'paragraphs' if found else 'lines'}, each a text of its own"
    if found:
        blank = sum(not line.strip() for line in content.split("\n"))
        note += f". The {blank} blank lines between them are not kept: an end token follows each text"
    return Part(str(path), {column: blocks}, notes=[note] if blocks else [])


def parse_json(path: Path, line: int, content: str) -> Any:
    """Parse one JSON document.

    Args:
        line: Its line in the file, for messages.

    Raises:
        RecipeError: A key is repeated, or the document cannot be read.
        json.JSONDecodeError: It is not valid JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise RecipeError(f"{path}, line {line}: the key {twice!r} is repeated in one object. Remove one of them.")
        return found

    try:
        return json.loads(content, object_pairs_hook=unique)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
        raise RecipeError(f"{path}, line {line}: cannot be read as JSON: {str(error).partition(';')[0]}.") from None


# -- encodings ---------------------------------------------------------------------------------------------------------


def open_text(path: Path, how: Read) -> BoundedText:
    """Open a text file that may be compressed, without translation of line ends. A byte-order mark determines the
    encoding."""
    encoding, head = _encoding(path, how)
    if encoding == "utf-8":
        for odd, name in ((1, "utf-16-le"), (0, "utf-16-be")):
            if head[odd::2].count(0) > len(head) / 4 and not head[1 - odd :: 2].count(0):
                raise RecipeError(
                    f"{path}, line 1: not UTF-8, but looks like UTF-16. If it is, give data.read.encoding={name}."
                )
    return BoundedText(_open(path, how), encoding, str(path), how, head.decode(encoding, "ignore"))


def _open(path: Path, how: Read) -> Any:
    import pyarrow

    codec = _codec(path, how)
    stream = pyarrow.input_stream(str(path), compression=codec, buffer_size=2**20)
    return stream if codec is None else io.BufferedReader(Expanded(stream, str(path), path.stat().st_size, how), 2**20)


def _codec(path: Path, how: Read) -> str | None:
    if how.compression is not None:
        return None if how.compression == "none" else how.compression
    suffix, codec = format_of(path)
    if codec is None and suffix != ".parquet":
        with path.open("rb") as file:
            head = file.read(4)
        codec = next((codec for magic, codec in MAGIC.items() if head.startswith(magic)), None)
    return codec


def _encoding(path: Path, how: Read) -> tuple[str, bytes]:
    """The encoding, and the first bytes of the file."""
    with _open(path, how) as stream:
        head: bytes = stream.read(1024)
    return next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), how.encoding or "utf-8"), head


def _undecodable(path: Path, how: Read, error: UnicodeError) -> RecipeError:
    """The error for bytes that cannot be decoded. Decodes the file again to find their line."""
    (encoding, _), line = _encoding(path, how), 1
    with _open(path, how) as stream:
        content: bytes = stream.read()
    try:
        content.decode(encoding)
    except UnicodeDecodeError as found:
        line, error = len(re.findall("\r\n?|\n", content[: found.start].decode(encoding, "ignore"))) + 1, found
    name = "UTF-8" if encoding.startswith("utf-8") else encoding
    remedy = (
        "Give its encoding, such as data.read.encoding=cp1252, or convert it: iconv -f latin1 -t utf-8 (with "
        "its real encoding)."
    )
    return RecipeError(f"{path}, line {line}: not {name} ({getattr(error, 'reason', error)}). {remedy}")
