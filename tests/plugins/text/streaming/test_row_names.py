"""Rows of a stream have the names that they have in memory: by their line, in formats that have lines."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from data_helpers import problem_of, text_data
from streaming_helpers import write_parquet

from fastloop.errors import FastloopError
from fastloop_plugins.rows.index import GROUP
from fastloop_plugins.text.dropped_rows import drop_rows
from fastloop_plugins.text.streaming.split import HEAD

COUNT = 2 * GROUP + 300
"""Rows of a file: three row groups."""
ROWS = [{"text": f"film {number}", "label": "ab"[number % 2]} for number in range(COUNT)]


def jsonl(rows: list[dict[str, Any]]) -> str:
    """Lines of JSON, with a blank one after each tenth row."""
    lines = []
    for number, row in enumerate(rows):
        lines.append(json.dumps(row) + "\n")
        if number % 10 == 9:
            lines.append("\n")
    return "".join(lines)


def write_plain(path: str) -> None:
    Path(path).write_text(jsonl(ROWS))


def write_gzip(path: str) -> None:
    Path(path).write_bytes(gzip.compress(jsonl(ROWS).encode()))


def write_utf16(path: str) -> None:
    Path(path).write_text(jsonl(ROWS), encoding="utf-16")


def write_csv(path: str) -> None:
    """Some cells have two lines, and there is a blank line here and there."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["text", "label"])
        for number, row in enumerate(ROWS):
            writer.writerow([row["text"] + "\nsecond line, of it" * (number % 7 == 3), row["label"]])
            if number % 11 == 5:
                file.write("\n")


def write_text(path: str) -> None:
    Path(path).write_text("".join(f"{row['text']}\nsecond line\n\n" for row in ROWS))


def write_table(path: str) -> None:
    write_parquet(path, ROWS)


FILES: dict[str, Callable[[str], None]] = {
    "rows.jsonl": write_plain,
    "rows.jsonl.gz": write_gzip,
    "utf16.jsonl": write_utf16,
    "rows.csv": write_csv,
    "rows.txt": write_text,
    "rows.parquet": write_table,
}


HALF = [{"column": "label", "equals": "b"}]
CASES = [(path, None) for path in FILES] + [(path, HALF) for path in FILES if not path.endswith(".txt")]
"""Files with the conditions of ``data.drop``. A text file has no column for one."""


@pytest.mark.parametrize(("path", "drop"), CASES, ids=str)
def test_a_row_of_a_stream_has_its_name_in_memory(path, drop):
    FILES[path](path)
    options: dict[str, Any] = {"drop": drop, "label": None}
    memory = text_data(path, **options)
    (table,) = drop_rows({"train": [memory.layout().read(path)]}, memory)["train"]
    streamed = text_data(path, streaming=True, **options)
    streamed.load()
    assert streamed.stream is not None
    index = streamed.stream.index
    size = int(index.rows.sum())
    assert size == len(table)
    for row in (0, 1, 13, GROUP // 2 + 7, GROUP, GROUP + 1, size - 1):
        expected = table.row(row + 1)
        if path.endswith(".parquet") and drop is not None:
            expected = f"{path}, row {row + 1} of those kept"
        assert str(index.name(row)) == expected


def read_stream(path: str, **options: Any) -> None:
    """Read all rows of a file as a stream."""
    data = text_data(path, streaming=True, **options)
    data.load()
    assert data.stream is not None
    index = data.stream.index
    with closing(data.stream.make_reader()) as reader:
        for group in range(len(index.rows)):
            for number, row in enumerate(reader.read(group, 0), int(index.firsts[group])):
                data.parse_rows([row], [index.name(number)])


@pytest.mark.parametrize("drop", [None, HALF], ids=["all rows", "every second row"])
@pytest.mark.parametrize(
    "broken", ['{"text": 5, "label": "a"}\n', '{"text": "a", \n', "[1]\n"], ids=["a number", "no JSON", "a list"]
)
@pytest.mark.parametrize("row", [3, HEAD + 2000])
def test_a_row_that_cannot_be_read_has_one_place(broken, row, drop):
    rows = ROWS * 3
    content = jsonl(rows[:row]) + broken + jsonl(rows[row:])
    Path("rows.jsonl").write_text(content)
    expected = f"rows.jsonl, line {jsonl(rows[:row]).count(chr(10)) + 1}"
    options: dict[str, Any] = {"label": None, "drop": drop}
    assert problem_of("rows.jsonl", **options).place == expected
    with pytest.raises(FastloopError) as raised:
        read_stream("rows.jsonl", **options)
    assert raised.value.problem.place == expected
