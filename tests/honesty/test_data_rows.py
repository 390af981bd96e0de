"""Random small tables as files of every format: the rows that train are the rows written, or the file is refused.

A short form runs with the other tests; FASTLOOP_RELIABILITY times as many examples are tried by hand, as in
tests/reliability. Not tried, because nothing in a file shows them: a text in quotes, or with a line end in it, that is
written without quoting.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from data_helpers import named_rows, text_data
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fastloop.errors import RecipeError

TIMES = float(os.environ.get("FASTLOOP_RELIABILITY", "1"))
EXAMPLES = 60
"""Tables of each format."""

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


def attempt(path: str, table: Table, counts: Counter[str], untyped: bool = False) -> None:
    """Read a file: exactly its rows, or one error that names it."""
    labelled = "label" not in table.options
    expected = [(text, class_name(label, untyped) if labelled else None) for text, label in table.rows]
    try:
        found = named_rows(text_data(path, **table.options))
    except RecipeError as error:
        message = str(error)
    else:
        assert found == expected
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
        attempt(path, table, counts, untyped)

    many()
    print(f"{counts.total()} tables: {counts['read']} read, {counts['refused']} refused")
    assert counts["read"] >= least * counts.total()


def store(
    draw: Any, name: str, content: str, encodings: tuple[str, ...] = ("utf-8", "utf-8", "utf-8-sig", "utf-16")
) -> str:
    """Characters as a file, in one of the encodings, compressed or not."""
    data = content.encode(draw(st.sampled_from(encodings)))
    if draw(st.booleans()):
        name, data = f"{name}.gz", gzip.compress(data, 1)
    Path(name).write_bytes(data)
    return name


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
        return store(draw, f"train.{suffix}", stream.getvalue()), True

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
        return store(draw, f"train.{suffix}", content), True

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
        return store(draw, f"train.{suffix}", content), False

    property_test(make, TYPED, least=0.6)


def test_tables_as_parquet():
    import pyarrow
    from pyarrow import parquet

    def make(draw: Any, table: Table) -> tuple[str, bool]:
        rows = [dict(zip(table.columns, table.cells(number), strict=True)) for number in range(len(table.rows))]
        made = pyarrow.Table.from_pylist(rows)
        if draw(st.booleans()):
            made = made.set_column(
                table.columns.index("text"),
                "text",
                made["text"].cast(draw(st.sampled_from([pyarrow.large_string(), pyarrow.string_view()]))),
            )
        if draw(st.booleans()) and pyarrow.types.is_string(made["text"].type):
            made = made.set_column(table.columns.index("text"), "text", made["text"].dictionary_encode())
        parquet.write_table(made, "train.parquet", compression=draw(st.sampled_from(["none", "snappy", "zstd"])))
        return "train.parquet", False

    property_test(make, TYPED, least=0.6)
