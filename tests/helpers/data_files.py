"""A data file and its expected rows or error, and functions that write contents: the table is ``broken_files``."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from pyarrow import parquet

Rows = list[tuple[str, str | None]]
"""Text and label of each row."""
ROWS: Rows = [(f"{('a dull', 'a fine')[number % 2]} film, number {number}", ("neg", "pos")[number % 2])
              for number in range(12)]  # fmt: skip
HEADER = ("text", "label")
TOP = "text,label\n"


@dataclass(frozen=True)
class DataFile:
    """A data file.

    Attributes:
        rows: The rows that it has; None: it must be refused.
        place: If it is refused: the place that the error names, after the path, such as ``, line 3``.
        code: The code of that error.
        streamed: Its code when the file is streamed; empty: the same.
        is_predicted: Whether the file is read to predict, although it cannot train: its labels are wrong, or it has no
            rows.
        data: Options of ``data``, such as ``read``.
        remedy: Options of ``data.read`` that the error proposes, and that read the rows ``mended``.
    """

    path: str
    content: bytes
    rows: Rows | None = None
    place: str = ""
    code: str = ""
    streamed: str = ""
    is_predicted: bool = True
    data: dict[str, Any] = field(default_factory=dict)
    remedy: dict[str, Any] = field(default_factory=dict)
    mended: Rows = field(default_factory=list)


FILES: dict[str, DataFile] = {}
"""Name -> file."""


def add(name: str, content: str | bytes, path: str, **facts: Any) -> None:
    """Add a file, whose name must be new."""
    assert name not in FILES, name
    FILES[name] = DataFile(path, content.encode() if isinstance(content, str) else content, **facts)


def good(name: str, path: str, content: str | bytes, rows: Rows, **read: Any) -> None:
    """Add a file that is read, with options of ``data.read``."""
    add(name, content, path, rows=rows, data={"read": read} if read else {})


def texts(name: str, path: str, content: str | bytes, lines: list[str]) -> None:
    """Add a file of texts without labels, which is read."""
    add(name, content, path, rows=[(line, None) for line in lines], data={"label": None})


def broken(
    name: str, path: str, content: str | bytes, place: str = "", code: str = "invalid-row", **facts: Any
) -> None:
    """Add a file that is refused, to train and to predict. ``facts``: further attributes."""
    add(name, content, path, place=place, code=code, is_predicted=False, **facts)


def mislabelled(name: str, path: str, content: str | bytes, place: str, code: str, **data: Any) -> None:
    """Add a file that is refused for its labels, or for its number of rows."""
    add(name, content, path, place=place, code=code, data=data)


def cells(rows: Rows, header: tuple[str, ...] = HEADER, delimiter: str = ",", end: str = "\n") -> str:
    """A file of cells, with quotes around those that have the delimiter."""
    lines = []
    for row in [header, *rows] if header else rows:
        quoted = [f'"{cell}"' if delimiter in cell else cell for cell in row]
        lines.append(delimiter.join(quoted) + end)
    return "".join(lines)


def reviews(**changed: str) -> str:
    """80 rows of a .tsv file. ``line_11`` replaces that line."""
    lines = ["text\tlabel"]
    for number in range(80):
        word, label = (("dull", "neg"), ("fine", "pos"))[number % 2]
        lines.append(f"film number {number} is {word}\t{label}")
    for name, line in changed.items():
        lines[int(name.removeprefix("line_")) - 1] = line
    return "\n".join(lines) + "\n"


def objects(rows: list[tuple[Any, Any]]) -> str:
    """A file of an object a line."""
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)


def parquet_of(found: pyarrow.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(found, file, **options)
    return file.getvalue()


def columns_of(labels: Any, texts: Any = ("a", "b", "c"), **more: Any) -> bytes:
    """A Parquet file of these columns."""
    found = {"text": texts[: len(labels)], "label": labels} | more
    return parquet_of(pyarrow.table(found))


def arrow_of(found: pyarrow.Table, rows: int | None = None, as_file: bool = False) -> bytes:
    """An Arrow stream, or the file format around one, with record batches of ``rows`` rows."""
    file = io.BytesIO()
    make = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with make(file, found.schema) as writer:
        writer.write_table(found, max_chunksize=rows)
    return file.getvalue()


def first_batch_end(content: bytes) -> int:
    """The offset in an Arrow stream after its first record batch."""
    source = pyarrow.BufferReader(content)
    pyarrow.ipc.read_schema(source)
    pyarrow.ipc.read_message(source)
    return int(source.tell())


def labels(*values: Any) -> str:
    """A jsonl file of these labels."""
    return objects([(f"text {number}", value) for number, value in enumerate(values)])
