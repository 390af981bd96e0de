"""Each format has one reader: a table in memory, rows one by one, and row groups from any position are the same.

Modules:
    plugins/fastloop_plugins/rows/arrow.py
    plugins/fastloop_plugins/rows/file.py
    plugins/fastloop_plugins/rows/formats.py
    plugins/fastloop_plugins/rows/json.py
    plugins/fastloop_plugins/rows/lines.py
    plugins/fastloop_plugins/rows/suffixes.py
    plugins/fastloop_plugins/rows/text.py
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from format_files import table, write
from streaming_helpers import write_arrow, write_lines, write_parquet

from fastloop.errors import DataError, RecipeError
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem
from fastloop_plugins.rows import index
from fastloop_plugins.rows.conll import Columns
from fastloop_plugins.rows.formats import CONLL, READERS, FileLayout, describe_formats
from fastloop_plugins.rows.index import Reader, find_shards, read_index
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.paths import find_files
from fastloop_plugins.rows.suffixes import FORMATS

COLUMNS = {"text": "text", "label": "label"}


def streamed(layout: FileLayout, path: str, skip: int = 0) -> list[tuple[Any, ...]]:
    """All rows, read from the last row group to the first, each from its row ``skip`` on."""
    found = read_index([path], layout, None)
    reader = Reader(found, layout, [*layout.columns])
    groups = [list(reader.read(group, skip)) for group in reversed(range(len(found.rows)))]
    reader.close()
    return [row for group in reversed(groups) for row in group]


def in_memory(layout: FileLayout, path: str) -> list[tuple[Any, ...]]:
    """The rows of a file as a table, which one by one are the same, with the same names in messages."""
    read = layout.read(path)
    rows = list(zip(*(read.column(key, name) for name, key in layout.columns.items()), strict=True))
    assert list(layout.rows(path)) == [(read.row(number), row) for number, row in enumerate(rows, 1)]
    return rows


def alike(layout: FileLayout, path: str) -> list[tuple[Any, ...]]:
    """The rows of a file, which all ways of reading give."""
    rows = in_memory(layout, path)
    assert streamed(layout, path) == rows
    return rows


def test_the_options_of_csv_files_hold_in_every_way(monkeypatch):
    monkeypatch.setattr(index, "GROUP", 2)
    Path("a.csv").write_text('a "fine; b\nfilm; c\nbore; d\nlove; e\n')
    how = Read(delimiter=";", columns=["text", "label"], quoting="none")
    assert alike(FileLayout(how, COLUMNS), "a.csv") == [
        ('a "fine', " b"),
        ("film", " c"),
        ("bore", " d"),
        ("love", " e"),
    ]


def test_sentences_are_read_in_every_way(monkeypatch):
    monkeypatch.setattr(index, "GROUP", 3)
    sentences = [(["EU", f"word{number}"], ["B-ORG", "O"]) for number in range(10)]
    lines = ["# id = 1\n" + "".join(f"{word} {tag}\n" for word, tag in zip(*pair, strict=True)) for pair in sentences]
    Path("a.conll").write_text("-DOCSTART- O\n\n" + "\n\n".join(lines))
    layout = FileLayout(Read(), {"words": "words", "tags": "tags"}, conll=Columns())
    assert alike(layout, "a.conll") == sentences
    assert layout.read("a.conll").row(2) == "a.conll, line 9"


def test_a_line_that_cannot_be_decoded_is_named_in_every_encoding():
    good = "text,label\n" + "fine,1\n" * 9000
    layout = FileLayout(Read(), COLUMNS)
    Path("a.csv").write_bytes(good.encode() + b"\xff,1\n")
    with expect_problem("invalid-row a.csv 9002 8", RecipeError):
        layout.read("a.csv")
    Path("a.csv").write_bytes(good.encode("utf-16") + b"\x00\xdc,\x001\x00\n\x00")
    with expect_problem("invalid-row a.csv 9002 utf-16", RecipeError):
        layout.read("a.csv")


def test_a_row_that_became_bad_is_named_by_its_number():
    Path("a.jsonl").write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(9)))
    layout = FileLayout(Read(), {"text": "text"})
    found = read_index(["a.jsonl"], layout, None)
    state = Path("a.jsonl").stat()
    Path("a.jsonl").write_text(Path("a.jsonl").read_text().replace('"6"', "'6'"))
    os.utime("a.jsonl", ns=(state.st_atime_ns, state.st_mtime_ns))  # else the file is refused as another one
    with expect_problem("invalid-row a.jsonl 7 JSON 10", DataError):
        list(Reader(found, layout, ["text"]).read(0, 5))


def test_a_json_list_is_not_streamed_and_the_error_names_jsonl():
    write("a.json", table(9))
    with expect_problem("no-streaming a.json", RecipeError):
        read_index(["a.json"], FileLayout(Read(), COLUMNS), None)


@pytest.mark.parametrize("content", ["[]", " [ \n] ", "[\n\n]\n"])
def test_a_json_list_without_elements_has_no_rows(content):
    Path("a.json").write_text(content)
    assert list(FileLayout(Read(), {"text": "text"}).rows("a.json")) == []


def test_a_column_of_a_json_list_may_be_missing_in_some_rows():
    Path("a.json").write_text('[{"text": "a", "label": 0}, {"text": "b"}]')
    layout = FileLayout(Read(), {"text": "text"}, optional=["label"])
    assert {name: list(found) for name, found in layout.read("a.json").columns.items()} == {
        "text": ["a", "b"],
        "label": [0, None],
    }
    assert [row for _, row in layout.rows("a.json")] == [("a", 0), ("b", None)]


@pytest.mark.parametrize(
    ("end", "place", "expected"),
    [
        ("", "line 3", "invalid-row JSON Expecting ','"),
        (",", "line 3", "invalid-row JSON Expecting"),
        ("] []", "line 3", "invalid-row JSON Extra data"),
        (', {"text" 1}]', "line 3", "invalid-row JSON Expecting ':'"),
        (', {"text": "1}]', "line 3", "invalid-row JSON Unterminated string"),
        (', {"text": "1", "text": "2"}]', "line 3", "invalid-row 'text'"),
        (", 12345]", "row 3", "invalid-row 12345 (int)"),
        (', {"text": ' + "1" * 5000 + "}]", "line 3", "invalid-row JSON 4300 digits"),
        (', {"text": ' + "[" * 99_999, "line 3", "invalid-row JSON recursion depth"),
        (', {"text": "' + "a" * 2**21 + '"}]', "line 3", "too-large 1 MiB"),
        ('\n\n{"text": 1}]', "line 5", "invalid-row JSON Expecting ','"),
    ],
)
def test_a_bad_element_of_a_json_list_is_named_after_the_rows_before_it(end, place, expected):
    Path("a.json").write_text('[\n{"text": "a"},\n{"text": "b"}' + end)
    found = list[Any]()
    with expect_problem(expected, RecipeError) as caught:
        found.extend(FileLayout(Read(max_row_mib=1), {"text": "text"}).rows("a.json"))
    assert caught.value.problem.place == f"a.json, {place}"
    assert found == [("a.json, row 1", ("a",)), ("a.json, row 2", ("b",))]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_lines_and_paragraphs_are_read_in_every_way(encoding, end, monkeypatch):
    monkeypatch.setattr(index, "GROUP", 4)
    layout, texts = FileLayout(Read(), {"text": "text"}), [f"é {number}" for number in range(10)]
    lines = [("", *texts, " "), tuple(f"{text}{end}and more{end} {end}" for text in texts)]
    for number, content in enumerate(lines):
        Path("a.txt").write_bytes(end.join(content).encode(encoding))
        assert alike(layout, "a.txt") == [(f"{text}\nand more",) if number else (text,) for text in texts]
        groups = read_index(["a.txt"], layout, None)
        assert len(groups.rows) == (3 if encoding == "utf-8-sig" else 1)
    assert (
        layout.read("a.txt").notes[0].startswith("a.txt: read as 10 paragraphs, each a text of its own. The 18 blank")
    )
    Path("a.txt").write_text("a\n\n" + "b\n" * 2**19 + "c\n")
    with expect_problem("too-large a.txt 524291 1 MiB", RecipeError):
        FileLayout(Read(max_row_mib=1), {"text": "text"}).read("a.txt")
    with expect_problem("no-streaming a.txt data.read.blank_lines", RecipeError):
        read_index(["a.txt"], FileLayout(Read(blank_lines=True), {"text": "text"}), None)


def test_an_arrow_file_is_read_in_both_of_its_formats_and_checked():
    content = table(90)
    layout, found = FileLayout(Read(), COLUMNS), pyarrow.Table.from_pylist(content)
    with pyarrow.ipc.new_file("a.arrow", found.schema) as file:
        file.write_table(found, max_chunksize=20)
    assert alike(layout, "a.arrow") == [(row["text"], row["label"]) for row in content]
    Path("b.arrow").write_bytes(Path("a.arrow").read_bytes()[:2000])
    write_arrow("c.arrow", content)
    damaged = bytearray(Path("c.arrow").read_bytes())
    first = damaged.index(content[0]["text"].encode())
    damaged[first - 200 : first - 8] = b"\xff" * 192  # the offsets of the texts, which are before them
    Path("c.arrow").write_bytes(damaged)
    encoded = pyarrow.table({name: found[name].dictionary_encode() for name in COLUMNS})
    with pyarrow.ipc.new_stream("d.arrow", encoded.schema) as file:
        file.write_table(encoded)
    for path, code in (("b", "file-unreadable"), ("c", "file-unreadable"), ("d", "wrong-type")):
        with expect_problem(f"{code} {path}.arrow:", RecipeError):
            layout.read(f"{path}.arrow")


@pytest.mark.parametrize(
    ("suffix", "values", "packed", "group"), [(row[0].strip("`"), *row[2:]) for row in describe_formats()]
)
def test_the_table_of_formats_is_that_of_the_readers(suffix, values, packed, group, monkeypatch):
    assert tuple(READERS) == FORMATS
    assert index.GROUP == 1024
    rows = [{"text": f"word{number}", "label": ["a", "b"]} for number in range(5)]
    path, layout = f"a{suffix}", FileLayout(Read(), {"text": "text"})
    if suffix in (".csv", ".tsv", ".txt"):
        lines = ["text"] * (suffix != ".txt") + [row["text"] for row in rows]
        Path(path).write_text("".join(f"{line}\n" for line in lines))
    elif suffix == CONLL:
        Path(path).write_text("".join(f"{row['text']} a\n\n" for row in rows))
        layout = FileLayout(Read(), {"words": "words", "tags": "tags"}, conll=Columns())
    elif suffix in (".arrow", ".parquet"):
        {".arrow": write_arrow, ".parquet": write_parquet}[suffix](path, rows)
    else:
        write_lines(path, rows)
    assert len(layout.read(path)) == len(list(layout.rows(path))) == 5
    recipe = make_recipe({}, Path("recipe.yaml"))
    assert find_shards(recipe, path, "here", (*READERS, CONLL)) == [[path]]
    assert len(streamed(layout, path)) == 5
    size = {"1,024 rows": 2, "a row group of the file": 2, "a record batch of the file": 2}[group]
    monkeypatch.setattr(index, "GROUP", 3)
    if suffix in (".arrow", ".parquet"):
        {".arrow": write_arrow, ".parquet": write_parquet}[suffix](path, rows, 3)
    assert len(read_index([path], layout, None).rows) == size
    with pyarrow.output_stream(f"{path}.gz", compression="gzip") as file:
        file.write(Path(path).read_bytes())
    with pytest.raises(RecipeError) if packed == "no" else nullcontext():
        assert find_files(recipe, f"{path}.gz", "train", "here", (*READERS, CONLL)) == [Path(f"{path}.gz")]
        assert len(layout.read(f"{path}.gz")) == 5
    assert ("lists" in values) == (suffix not in (".csv", ".tsv", ".txt"))
    if "lists" in values:
        key = "words" if suffix == CONLL else "label"
        found = replace(layout, columns={key: "words"}).read(path).column("words", key)[0]
        assert found == (["word0"] if suffix == CONLL else ["a", "b"])


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.csv", "text\na\nb\nc,d\n"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n{"text": c}\n'),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n' + "c" * 2**21),
        ("a.conll", "a O\n\nb O\n\nc\n"),
    ],
    ids=["csv", "jsonl", "a long line", "conll"],
)
def test_the_rows_before_a_bad_row_are_read_first(path, content):
    """So a job that predicts them keeps their predictions."""
    Path(path).write_text(content)
    columns = {"words": "words", "tags": "tags"} if path == "a.conll" else {"text": "text"}
    found: list[Any] = []
    with pytest.raises(RecipeError, match=rf"^{path}, line [345]: "):
        found.extend(FileLayout(Read(max_row_mib=1), columns, conll=Columns()).rows(path))
    assert len(found) == 2
