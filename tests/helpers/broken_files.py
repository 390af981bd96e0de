"""Broken and odd data files. Other parsers read many of the broken ones wrong, without a message."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from pyarrow import parquet

Rows = list[tuple[str, str]]
"""Text and label of each row."""
ROWS: Rows = [(f"{('a dull', 'a fine')[number % 2]} film, number {number}", ("neg", "pos")[number % 2])
              for number in range(12)]  # fmt: skip
HEADER = ("text", "label")


@dataclass(frozen=True)
class DataFile:
    """A data file.

    Attributes:
        rows: The rows that it has; None: it must be refused.
        place: If it is refused: the beginning of the message after the path, such as ``, line 3``.
        read: ``data.read``.
    """

    path: str
    content: bytes
    rows: Rows | None = None
    place: str = ""
    read: dict[str, Any] = field(default_factory=dict)


FILES: dict[str, DataFile] = {}
"""Name -> file."""


def good(name: str, path: str, content: str | bytes, rows: Rows, **read: Any) -> None:
    """Add a file that is read."""
    FILES[name] = DataFile(path, content.encode() if isinstance(content, str) else content, rows, read=read)


def broken(name: str, path: str, content: str | bytes, place: str = "") -> None:
    """Add a file that is refused."""
    FILES[name] = DataFile(path, content.encode() if isinstance(content, str) else content, place=place)


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


def arrow_of(found: pyarrow.Table, rows: int | None = None) -> bytes:
    file = io.BytesIO()
    with pyarrow.ipc.new_stream(file, found.schema) as writer:
        writer.write_table(found, max_chunksize=rows)
    return file.getvalue()


# -- quotes ------------------------------------------------------------------------------------------------------------

STRAY = '"never closed\tneg'
broken("a quote closed by another one", "a.tsv", reviews(line_11=STRAY, line_34='"another one\tpos'), ", line 11")
broken("a quote that swallows 22 rows", "a.tsv", reviews(line_11=STRAY, line_34='it is 5"\tpos'), ", line 11")
broken("a quote that never closes", "a.tsv", reviews(line_11=STRAY), ", line 11")
broken("a quoted word opens a cell", "a.tsv", reviews(line_11='"Great" film\tneg'), ", line 11")
COMMAS = reviews(line_11=STRAY, line_34='it is 5"\tpos').replace("\t", ",")
broken("a quote that swallows 22 rows of a csv", "a.csv", COMMAS, ", line 11")
broken("a cell that looks like rows", "a.csv", cells(ROWS) + '"one,neg\ntwo",pos\n', ", line 14")
LONG: Rows = [(f"film {number}, fine\r\nand, long\n\n", ("neg", "pos")[number % 2]) for number in range(8)]
LONG.append(('so "so"\n,', "neg"))
QUOTED = io.StringIO(newline="")
csv.writer(QUOTED, lineterminator="\n").writerows([HEADER, *LONG])
good("cells over several lines", "a.csv", QUOTED.getvalue(), LONG)

# -- cells -------------------------------------------------------------------------------------------------------------

for size in (200_000, 6_000_000):
    BIG: Rows = [("x" * size, "neg"), ("y", "pos")]
    good(f"a cell of {size} characters", "a.csv", cells(BIG), BIG)
broken("too many cells", "a.csv", cells(ROWS) + "one, two,neg\n" + cells(ROWS, ()), ", line 14")
broken("too few cells", "a.csv", cells(ROWS) + "one\n" + cells(ROWS, ()), ", line 14")
for name, end in {"CRLF": "\r\n", "CR": "\r"}.items():
    broken(f"{name} among LF", "a.csv", cells(ROWS) + f"one{end}two,neg\nthree,pos\n", ", line 14")
    good(f"{name} alone", "a.csv", cells(ROWS, end=end), ROWS)
broken("a header in the middle", "a.csv", cells(ROWS) + cells(ROWS), ", line 14")
broken("a repeated column", "a.csv", "text,label,text\na,neg,b\nc,pos,d\n", ", line 1")
good("trailing commas", "a.csv", "text,label,,\na,neg,,\nc,pos,,\n", [("a", "neg"), ("c", "pos")])
broken("no header", "a.csv", cells(ROWS, ()))
good("semicolons", "a.csv", cells(ROWS, delimiter=";"), ROWS)
TYPED: Rows = [("007", "true"), ("1e5", "false"), ("NA", "true"), ("true", "false"), ("2020-01-01", "true"),
               (" x ", "false"), ("", "true"), ("null", "true")]  # fmt: skip
good("cells that look like numbers, dates and null", "a.csv", cells(TYPED), TYPED)
good("a zero byte in a cell", "a.csv", "text,label\na\0b,neg\nc,pos\n", [("a\0b", "neg"), ("c", "pos")])

# -- encodings and compression -----------------------------------------------------------------------------------------

ACCENTS: Rows = [("café 🙂", "neg"), ("\u2028 naïve", "pos")]
for encoding in ("utf-8-sig", "utf-16", "utf-32"):
    good(f"a csv in {encoding}", "a.csv", cells(ACCENTS).encode(encoding), ACCENTS)
good("a jsonl in utf-16", "a.jsonl", objects(ACCENTS).encode("utf-16"), ACCENTS)
CAFE = "text,label\nfine,neg\ncafé,pos\n".encode("cp1252")
broken("a csv in cp1252", "a.csv", CAFE, ", line 3")
good("a csv in cp1252, as given", "a.csv", CAFE, [("fine", "neg"), ("café", "pos")], encoding="cp1252")
OTHER = '{"text": "x", "label": "neg"}\n{"text": "café", "label": "pos"}\n'.encode("cp1252")
broken("a jsonl in cp1252", "a.jsonl", OTHER, ", line 2")
broken("UTF-16 without a mark", "a.csv", cells(ROWS).encode("utf-16-le"), ", line 1")
PACKERS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
for suffix, pack in PACKERS.items():
    good(f"a csv.{suffix}", f"a.csv.{suffix}", pack(cells(ROWS).encode()), ROWS)
    broken(f"a csv.{suffix} that is cut off", f"a.csv.{suffix}", pack(cells(ROWS).encode())[:-9])
    broken(f"text that is called csv.{suffix}", f"a.csv.{suffix}", cells(ROWS))
SPACES = objects([("x" * 1000, "0"), ("y", "1")]) + " " * 60_000_000 + "\n"
broken("60 MB of spaces in 60 kB", "a.jsonl.gz", gzip.compress(SPACES.encode()))

# -- JSON --------------------------------------------------------------------------------------------------------------

FIRST = '{"text": "a", "label": "neg"}'
SECOND = '{"text": "b", "label": "neg", "label": "pos"}'
broken("a repeated key in a jsonl", "a.jsonl", f"{FIRST}\n{SECOND}", ", line 2")
broken("a repeated key in a list", "a.json", f"[{FIRST}, {SECOND}]", ", line 1")
BEGIN = '{"text": "a", "label": "0"}\n'
broken("half a UTF-16 pair", "a.jsonl", BEGIN + '{"text": "b \\ud83d", "label": "1"}\n', ", line 2")
MISSING = BEGIN + '{"txt": "b", "label": "1"}\n{"text": null, "label": "1"}\n'
good("a text that is missing or null", "a.jsonl", MISSING, [("a", "0"), ("", "1"), ("", "1")])
broken("5000 digits", "a.jsonl", BEGIN + '{"text": "b", "label": "1", "n": ' + "9" * 5000 + "}\n", ", line 2")
broken("100,000 lists", "a.jsonl", BEGIN + '{"text": "b", "label": "1", "n": ' + "[" * 100_000 + "\n", ", line 2")
HALF = objects(ROWS[:6])
broken("single quotes in a line", "a.jsonl", HALF + "{'text': 'a', 'label': 'neg'}\n" + HALF, ", line 7")
broken("a line that is a list", "a.jsonl", HALF + "[1]\n" + HALF, ", line 7")
broken("a text that is a number", "a.jsonl", HALF + '{"text": 5, "label": "neg"}\n' + HALF, ", line 7")
broken("a list that is cut off", "a.json", f'[\n{FIRST},\n{{"text": "b", "label": "y"}}', ", line 3")
broken("a header among objects", "a.jsonl", objects([*ROWS, HEADER, *ROWS]), ", line 13")
DIFFER = '{"text": "a", "label": "x", "m": [{"a": 1}]}\n{"text": "b", "label": "y", "m": {"b": "c"}}\n'
good("values that differ by row", "a.jsonl", DIFFER, [("a", "x"), ("b", "y")])
LATE: Rows = [(f"t{number}", "x" if number % 2 else "y") for number in range(60_100)]
LATER = [
    {"text": text, "label": label} | ({"extra": {"k": [number]}} if number > 60_000 else {})
    for number, (text, label) in enumerate(LATE)
]
good("a column that begins after 60,000 rows", "a.jsonl", "\n".join(map(json.dumps, LATER)), LATE)

# -- labels ------------------------------------------------------------------------------------------------------------

broken("labels of text and numbers", "a.jsonl", objects([("a", "x"), ("b", 1), ("c", "x"), ("d", 1)]), ", line 1")
broken("a label that is NaN", "a.jsonl", objects([("a", 0), ("b", float("nan")), ("c", 1)]), ", line 2")
broken("a label that is empty", "a.csv", "text,label\na,neg\nb,\nc,pos\n", ", line 3")
broken("a label that is 0.5", "a.jsonl", objects([("a", 0), ("b", 0.5), ("c", 1)]), ", line 2")
broken("labels 01 and 1", "a.csv", "text,label\na,01\nb,1\nc,02\n", ", line 2")

# -- tables ------------------------------------------------------------------------------------------------------------

TABLE = pyarrow.Table.from_pylist([{"text": text, "label": label} for text, label in ROWS])
TWICE = pyarrow.table([["a", "b"], ["x", "y"], ["c", "d"]], names=["text", "label", "text"])
broken("a repeated column of a parquet", "a.parquet", parquet_of(TWICE))
broken("a parquet that is cut off", "a.parquet", parquet_of(TABLE)[:-30])
LATIN = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
UNDECODABLE = pyarrow.table({"text": LATIN, "label": ["x", "y"]})
broken("text of a parquet that is not UTF-8", "a.parquet", parquet_of(UNDECODABLE, write_statistics=False))
ENCODED = TABLE.set_column(0, "text", TABLE["text"].dictionary_encode().combine_chunks())
good("a parquet with a dictionary", "a.parquet", parquet_of(ENCODED), ROWS)
DAMAGED = bytearray(arrow_of(TABLE))
OFFSETS = DAMAGED.index(ROWS[0][0].encode())
DAMAGED[OFFSETS - 56 : OFFSETS - 8] = b"\xff" * 48
broken("an arrow with damaged offsets", "a.arrow", bytes(DAMAGED))
broken("an arrow that is cut off", "a.arrow", arrow_of(TABLE, 3)[:-500])
good("an arrow stream", "a.arrow", arrow_of(TABLE), ROWS)
