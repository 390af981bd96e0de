"""Reads rows for the text tasks: csv, tsv, json, jsonl, parquet and txt files, and rows that Python gives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.errors import RecipeError, did_you_mean

FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")


@dataclass
class Part:
    """Rows from one place, a column at a time."""

    where: str
    columns: Mapping[str, Any]  # name -> list, or pyarrow's column
    classes: list[str] | None = None  # names of the labels, where a dataset's features say them
    unreadable: int = 0  # rows that are not here because they could not be read

    def column(self, key: str, name: str) -> list[Any]:
        """The values of the column that ``data.<key>`` names."""
        if name not in self.columns:
            have = ", ".join(map(str, self.columns)) or "none"
            hint = did_you_mean(name, map(str, self.columns)).partition(" Expected")[0]
            raise RecipeError(f"{self.where}: there is no column {name!r}, which data.{key} names. Its columns: {have}.{hint}")
        values = self.columns[name]
        try:
            return values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        except UnicodeDecodeError as error:  # parquet's text is not checked where it is read
            raise RecipeError(f"{self.where}: the column {name!r}, which data.{key} names, is not UTF-8 ({error.reason}).") from None

    def row(self, number: int) -> str:
        """How messages name a row; the first is 1."""
        return f"{self.where}, row {number}"


def show(value: Any) -> str:
    """A value for a message, cut short, with its type."""
    return f"{value!r:.60} ({type(value).__name__})"


def make_part(where: str, rows: Any, label: str | None = None) -> Part:
    """A part of what a dataset or a function gives: a ``datasets.Dataset``, or a list of mappings."""
    if hasattr(rows, "with_format"):
        table = rows.with_format("arrow")[:]
        return Part(where, dict(zip(table.column_names, table.columns, strict=True)), getattr(rows.features.get(label), "names", None))
    rows = list(rows)
    columns: dict[str, None] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise RecipeError(f"{where}, row {number}: found {show(row)}, expected a mapping of columns.")
        columns |= dict.fromkeys(row)
    return Part(where, {name: [row.get(name) for row in rows] for name in columns})


def read_file(path: Path, text: str, skip_unreadable: bool = False) -> Part:
    """One file's rows. Read directly, not through a cache of converted copies; a cell that says NA is the text NA.

    Args:
        text: The column that is text even where it looks like numbers.
        skip_unreadable: Leave out lines of csv, tsv and jsonl files that are none, and count them.

    Raises:
        RecipeError: It cannot be read as what its suffix says.
    """
    import pyarrow  # type: ignore[import-untyped]

    try:
        return _read_as(path, path.suffix.lower(), text, skip_unreadable)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path}, line {line}: not UTF-8 ({error.reason}). Convert it: iconv -f latin1 -t utf-8 (or what it is in)."
        ) from None
    except (OSError, pyarrow.ArrowException) as error:
        raise RecipeError(f"{path}: cannot be read as {path.suffix}: {str(error).splitlines()[0]}.") from None


def _read_as(path: Path, suffix: str, text: str, skip_unreadable: bool) -> Part:
    import pyarrow

    if suffix in (".csv", ".tsv"):
        from pyarrow import csv

        if not path.stat().st_size:
            return Part(str(path), {text: []})
        bad: list[Any] = []
        shape = csv.ParseOptions(delimiter="," if suffix == ".csv" else "\t", newlines_in_values=True)

        def skip(row: Any) -> str:
            bad.append(row)
            return "skip"

        if skip_unreadable:
            shape.invalid_row_handler = skip
        whole = csv.ReadOptions(block_size=min(path.stat().st_size + 1, 2**31 - 1))  # a column's type then comes from all of its cells
        types = csv.ConvertOptions(column_types={text: pyarrow.string()})
        table = csv.read_csv(path, read_options=whole, parse_options=shape, convert_options=types)
        return Part(str(path), dict(zip(table.column_names, table.columns, strict=True)), unreadable=len(bad))
    if suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.read_table(path)
        return Part(str(path), dict(zip(table.column_names, table.columns, strict=True)))
    content = path.read_text(encoding="utf-8-sig")
    if suffix == ".txt":  # paragraphs, or lines where there are no paragraphs
        blocks = re.split(r"\n\s*\n", content.strip("\n")) if re.search(r"\S\s*\n\s*\n\s*\S", content) else content.splitlines()
        return Part(str(path), {text: [block for block in blocks if block.strip()]})
    if content.lstrip().startswith("["):
        return make_part(str(path), json.loads(content))
    rows, broken = [], 0
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                if not skip_unreadable:
                    raise json.JSONDecodeError(error.msg, "\n" * (number - 1) + line, number - 1) from None
                broken += 1
    part = make_part(str(path), rows) if rows else Part(str(path), {text: []})
    part.unreadable = broken
    return part
