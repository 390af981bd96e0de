"""Random small tables as files of every format: the rows that train are the rows written, or the file is refused.

A file that is read gives the same rows one by one and as a stream: in any number of lanes, processes and data workers,
and from any step of an epoch on.

A short form runs with the other tests; FASTLOOP_RELIABILITY times as many examples are tried by hand, as in
tests/reliability. Not tried, because nothing in a file shows them: a text in quotes, or with a line end in it, that is
written without quoting.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_helpers import named_rows, text_data
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fastloop import Settings
from fastloop.data import Loader
from fastloop.errors import RecipeError
from fastloop_plugins.rows import index
from fastloop_plugins.rows.formats import FileLayout
from fastloop_plugins.rows.index import Reader, read_index
from fastloop_plugins.rows.order import Order
from fastloop_plugins.text.streaming.dataset import StreamedDataset

TIMES = float(os.environ.get("FASTLOOP_RELIABILITY", "1"))
EXAMPLES = 60
"""Tables of each format."""
STEP = 4
"""Samples of a step."""

WORDS = """NA N/A null nan NaN None #N/A <NA> - 007 7 7.0 1e5 1E5 0x1F 1_000 +1 -0 inf true True FALSE 2020-01-01 12:30
    2020-01-01T00:00:00Z
    "" "a" a" "a a""b '' 'a' \\ \\" \\n =1+1 #a text label text,label a,neg neg a;b a|b é 🙂 日本 \u202e"""
LINES = [
    "a\tneg",
    "a\nb",
    "a\r\nb",
    "a\rb",
    "\n",
    "\r",
    "\r\n",
    "a\n",
    "a\r",
    "\na",
    'a, "b"',
    'a\n"b"\nc',
    "a,neg\nb,pos",
    "a\u2028b",
    "a\u2029b",
]
CONTROLS = ["a\u0085b", "a\x0bb", "a\x0cb", "a\x1cb", "a\x1fb", "\x7f", "\ufeff", "\ufeffa", "a\u00a0"]
TRAPS = [*WORDS.split(), *LINES, *CONTROLS, "", " ", "  a", "a  ", "\t", "x" * 5000, '"' * 7, ", , ,"]
texts = st.one_of(
    st.sampled_from(TRAPS),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.text(st.sampled_from("a \"',;|\t\n\r\\\u2028"), max_size=8),
    st.lists(st.sampled_from(TRAPS), min_size=2, max_size=3).map("".join),
)
LABELS: list[tuple[Any, ...]] = [
    *[
        ("neg", "pos"),
        ("0", "1"),
        ("1", "0", "2"),
        ("0.0", "1.0"),
        ("01", "02", "10"),
        ("true", "false"),
        ("NA", "null"),
        ("nan", "x"),
    ],
    *[
        ("a b", "a  b"),
        (" a", "a "),
        ("a,b", "a;b"),
        ('"a"', "a"),
        ("2020-01-01", "2021-01-01"),
        ("0x1F", "0x2F"),
        ("a\nb", "c"),
        ("\u2028", "é"),
    ],
]
TYPED: list[tuple[Any, ...]] = [*LABELS, (0, 1), (0.0, 1.0), (False, True), (2, 0, 1)]


@dataclass
class Table:
    """Rows, and what else a file of them has."""

    rows: list[tuple[str, Any]]
    columns: list[str]  # in the order of the file
    options: dict[str, Any] = field(default_factory=dict)  # of the section

    def cells(self, number: int) -> list[Any]:
        """One row's, in the order of the columns."""
        row = {"text": self.rows[number][0], "label": self.rows[number][1], "more": f"{number}, more"}
        return [row[name] for name in self.columns]


@st.composite
def tables(draw: Any, labels: list[tuple[Any, ...]], label: bool | None = None) -> Table:
    found = draw(st.lists(texts, min_size=2, max_size=7))
    if draw(st.booleans()):
        found += found[: draw(st.integers(1, 3))]  # repeated lines
    classes = draw(st.sampled_from(labels))
    labelled = draw(st.booleans()) if label is None else label
    chosen = [*classes, *(draw(st.sampled_from(classes)) for _ in found)][: len(found)]
    if len(found) < len(classes):
        found += ["a"] * (len(classes) - len(found))
        chosen = list(classes)
    columns = draw(st.permutations(["text", *["label"] * labelled, *draw(st.sampled_from([[], ["more"]]))]))
    return Table(list(zip(found, chosen, strict=True)), columns, {} if labelled else {"label": None})


def class_name(label: Any, untyped: bool) -> str:
    """The name of a label's class: numbers are whole, booleans in lower case."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) or (untyped and label in ("0.0", "1.0")):
        return str(int(float(label)))
    return str(label)


@dataclass(frozen=True)
class Ways:
    """How a file is read beside the table in memory.

    Attributes:
        buffer: Rows to shuffle in; 0: in order.
        processes: How many of them share the samples of a step.
        step: The step of the epoch at which a run resumes, or one after its end: the last step then.
    """

    lanes: int
    buffer: int
    processes: int
    workers: int
    epoch: int
    step: int


ways_of_reading = st.builds(
    Ways,
    lanes=st.sampled_from([1, 2, 3]),
    buffer=st.sampled_from([0, 3, 100]),
    processes=st.sampled_from([1, 2]),
    workers=st.sampled_from([0] * 15 + [1]),  # a worker takes as long as a hundred small files
    epoch=st.integers(0, 2),
    step=st.integers(0, 3),
)


def check_other_ways(path: str, layout: FileLayout, ways: Ways) -> None:
    """Check that a file has the same rows one by one and as a stream as in the table of all of them."""
    table = layout.read(path)
    rows = list(zip(*(table.columns[name] for name in layout.columns), strict=True))
    places = [table.row(number + 1) for number in range(len(rows))]
    assert list(layout.rows(path)) == list(zip(places, rows, strict=True))
    assert set(layout.columns) <= set(layout.first_names(path))
    with layout.open(path) as file:
        if file.not_streamed:
            return
    groups = read_index([path], layout, None)
    read = partial(Reader, groups, layout, [*layout.columns])
    order = partial(Order, [groups.rows], None, 1, ways.lanes, ways.buffer, STEP)
    stream = StreamedDataset(groups, read, [0], order, pair_rows)
    whole = steps_of(stream, ways.epoch, 1, 0)
    assert sorted(number for step in whole for number, _ in step) == list(range(len(rows)))
    assert all(rows[number] == row for step in whole for number, row in step)
    assert [stream[number] for number in range(len(rows))] == rows
    if not ways.buffer:
        assert [number for step in whole for number, _ in step] == list(range(len(rows)))
    step = min(ways.step, len(whole) - 1)
    assert steps_of(stream, ways.epoch, ways.processes, ways.workers, step) == whole[step:]


def pair_rows(rows: list[Any], names: list[str]) -> list[Any]:
    """The samples of rows: the rows."""
    assert len(rows) == len(names)
    return rows


def steps_of(
    stream: StreamedDataset, epoch: int, processes: int, workers: int, step: int = 0
) -> list[list[tuple[int, Any]]]:
    """The numbers and rows of each step of an epoch: those of all processes, in the order of ranks."""
    ranks = []
    for rank in range(processes):
        loader = Loader(
            stream,
            list,
            Settings(num_workers=workers),
            batch_size=STEP,
            micro_batch_size=STEP // processes,
            rank=rank,
            world_size=processes,
            seed=1,
            shuffle=True,
        )
        steps = []
        for batches in loader.steps(epoch, step * STEP):
            pairs = list[tuple[int, Any]]()
            for batch in batches:
                pairs += zip(batch.ids, batch.inputs, strict=False)  # a process without samples has others as fillers
            steps.append(pairs)
        ranks.append(steps)
        loader.close()
    return [[pair for part in parts for pair in part] for parts in zip(*ranks, strict=True)]


def attempt(path: str, table: Table, counts: Counter[str], ways: Ways, untyped: bool = False) -> None:
    """Read a file: exactly its rows, or one error that names it."""
    labelled = "label" not in table.options
    expected = [(text, class_name(label, untyped) if labelled else None) for text, label in table.rows]
    data = text_data(path, **table.options)
    try:
        found = named_rows(data)
    except RecipeError as error:
        message = str(error)
    else:
        assert found == expected
        check_other_ways(path, data.layout(), ways)
        counts["read"] += 1
        return
    assert message.startswith(path)
    counts["refused"] += 1
    event(f"refused: {re.sub(r'[0-9]+', 'N', message.removeprefix(path))[:70]}")


def property_test(make: Callable[..., Any], labels: list[tuple[Any, ...]], least: float) -> None:
    """Try many tables; at least the share ``least`` of them is read, so that refusing everything is no way to pass.

    Args:
        make: Draws what it needs, writes a table, and returns its path and whether its cells are untyped.
    """
    counts: Counter[str] = Counter()

    @settings(
        max_examples=max(1, round(EXAMPLES * TIMES)),
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(st.data())
    def many(data: st.DataObject) -> None:
        table = data.draw(tables(labels))
        path, untyped = make(data.draw, table)
        attempt(path, table, counts, data.draw(ways_of_reading), untyped)

    many()
    print(f"{counts.total()} tables: {counts['read']} read, {counts['refused']} refused")
    assert counts["read"] >= least * counts.total()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, compresslevel=1),
    ".bz2": bz2.compress,
    ".zst": partial(pyarrow.compress, codec="zstd", asbytes=True),
}
MARKED = ("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32")
GIVEN = ("cp1252", "shift_jis", "iso2022_jp", "utf-16-le", "utf-8")
"""Encodings that ``data.read.encoding`` names. A file that cannot hold the characters has another one."""


def store(draw: Any, name: str, content: str, table: Table) -> str:
    """Characters as a file, in one of the encodings, compressed or not."""
    encoding = draw(st.sampled_from(MARKED + GIVEN))
    if encoding in GIVEN:
        try:
            is_held = content.encode(encoding).decode(encoding) == content
        except UnicodeError:
            is_held = False
        if is_held and not content.startswith("\ufeff"):
            table.options["read"] = (table.options.get("read") or {}) | {"encoding": encoding}
        else:
            encoding = "utf-16"
    suffix = draw(st.sampled_from([*PACK]))
    Path(name + suffix).write_bytes(PACK[suffix](content.encode(encoding)))
    return name + suffix


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of three rows, read two at a time."""
    monkeypatch.setattr(index, "GROUP", 3)
    monkeypatch.setattr(index, "ROWS_AT_ONCE", 2)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_tables_that_pythons_csv_module_writes(suffix):
    def make(draw: Any, table: Table) -> tuple[str, bool]:
        delimiter = "," if suffix == "csv" else "\t"
        given, names = draw(st.sampled_from([delimiter, delimiter, ";", "|"])), draw(st.booleans())
        stream = io.StringIO(newline="")
        quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]))
        terminator = draw(st.sampled_from(["\n", "\r\n"]))
        # before Python 3.13, csv writes a bare "\r" without quotes
        if quoting == csv.QUOTE_MINIMAL and terminator == "\n":
            table.rows = [(text.replace("\r", "_"), label) for text, label in table.rows]
        writer = csv.writer(stream, delimiter=given, quoting=quoting, lineterminator=terminator)
        if names:
            writer.writerow(table.columns)
        else:
            table.options["read"] = {"columns": table.columns, "delimiter": given}
        writer.writerows(table.cells(number) for number in range(len(table.rows)))
        if not names and table.cells(0)[0].startswith("\ufeff"):  # which is a mark, and no text
            table.rows = [("a", label) for _, label in table.rows]
            return make(draw, table)
        return store(draw, f"train.{suffix}", stream.getvalue(), table), True

    property_test(make, LABELS, least=0.5)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_tables_that_are_written_by_hand(suffix):
    """Cells between delimiters, quoted as the format asks for or not at all."""

    def make(draw: Any, table: Table) -> tuple[str, bool]:
        delimiter, end = "," if suffix == "csv" else "\t", draw(st.sampled_from(["\n", "\r\n", "\r"]))
        quoting = draw(st.sampled_from(["none", "some", "all"]))
        if quoting == "none":
            table.options["read"] = {"quoting": "none"}
            lost = dict.fromkeys(map(ord, delimiter + "\r\n"), "_")
            table.rows = [(text.translate(lost), label.translate(lost)) for text, label in table.rows]
            if table.columns == ["text"]:
                table.rows = [(text or "_", label) for text, label in table.rows]  # a line of nothing is none

        def cell(text: str) -> str:
            must = (
                text.startswith('"')
                or any(part in text for part in (delimiter, "\r", "\n"))
                or (not text and table.columns == ["text"])
            )
            if quoting == "all" or (quoting == "some" and (must or draw(st.booleans()))):
                return '"' + text.replace('"', '""') + '"'
            return text.replace(delimiter, "_") if quoting == "none" else text

        lines = [table.columns, *(table.cells(number) for number in range(len(table.rows)))]
        content = end.join(delimiter.join(map(cell, line)) for line in lines) + draw(
            st.sampled_from([end, "", end * 3])
        )
        return store(draw, f"train.{suffix}", content, table), True

    property_test(make, LABELS, least=0.5)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_tables_as_json(suffix):
    def make(draw: Any, table: Table) -> tuple[str, bool]:
        ascii_only, end = draw(st.booleans()), draw(st.sampled_from(["\n", "\r\n", " \n", "\n\n"]))
        rows = [dict(zip(table.columns, table.cells(number), strict=True)) for number in range(len(table.rows))]
        if suffix == "jsonl":
            content = end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows) + draw(
                st.sampled_from([end, ""])
            )
        else:
            content = json.dumps(rows, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
        if draw(st.integers(0, 9)) == 0:
            before, key, after = content.partition('"text":')
            content = f'{before}{key} "other", {key}{after}'
            table.rows = [("a key that is there twice", label) for _, label in table.rows]  # which is to be refused
        return store(draw, f"train.{suffix}", content, table), False

    property_test(make, TYPED, least=0.6)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_with_types(suffix):
    def make(draw: Any, table: Table) -> tuple[str, bool]:
        rows = [dict(zip(table.columns, table.cells(number), strict=True)) for number in range(len(table.rows))]
        made, place = pyarrow.Table.from_pylist(rows), table.columns.index("text")
        if draw(st.booleans()):
            kind = draw(st.sampled_from([pyarrow.large_string(), pyarrow.string_view()]))
            made = made.set_column(place, "text", made["text"].cast(kind))
        size, path = draw(st.integers(1, 4)), f"train.{suffix}"
        if suffix == "arrow":
            write = draw(st.sampled_from([pyarrow.ipc.new_stream, pyarrow.ipc.new_file]))
            with write(path, made.schema) as file:
                file.write_table(made, max_chunksize=size)
            return path, False
        if draw(st.booleans()) and pyarrow.types.is_string(made["text"].type):
            made = made.set_column(place, "text", made["text"].dictionary_encode())
        codec = draw(st.sampled_from(["none", "snappy", "zstd"]))
        parquet.write_table(made, path, compression=codec, row_group_size=size)
        return path, False

    property_test(make, TYPED, least=0.6)


def test_texts_as_lines_and_paragraphs():
    def make(draw: Any, table: Table) -> tuple[str, bool]:
        end, gap = draw(st.sampled_from(["\n", "\r\n", "\r"])), draw(st.sampled_from([1, 2]))
        lost = dict.fromkeys(map(ord, "\r\n"), "_")
        lines = [text.translate(lost) for text, _ in table.rows]
        lines = [line if line.strip() and not line.startswith("\ufeff") else "a" for line in lines]
        table.rows = [(line, None) for line in lines]
        table.options["label"] = None
        return store(draw, "train.txt", (end * gap).join(lines) + draw(st.sampled_from(["", end])), table), False

    property_test(make, TYPED, least=0.9)
