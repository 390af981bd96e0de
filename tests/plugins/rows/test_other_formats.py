"""Tests of formats that other packages read, by the example in docs/write-a-task.md."""

from __future__ import annotations

import gzip
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fastloop import PluginError, RecipeError
from fastloop.errors import UsageError
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem
from fastloop_plugins.rows import suffixes
from fastloop_plugins.rows.formats import FileLayout, reader_of
from fastloop_plugins.rows.index import Reader, read_index
from fastloop_plugins.rows.options import Read
from fastloop_plugins.text.chunks import text_chunks
from fastloop_plugins.text.data import TextData
from fastloop_tools.inference.predict import read_source

PAGE = Path(__file__).parents[3] / "docs" / "write-a-task.md"


@pytest.fixture
def entry(monkeypatch, tmp_path):
    """Install the reader of the page for a test, or another object."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class Ltsv" in code)
    Path("ltsv_reader.py").write_text(code + "\n\nnumber = 3\n")

    def install(value: str = "ltsv_reader:Ltsv") -> None:
        point = EntryPoint(".ltsv", value, suffixes.GROUP)
        monkeypatch.setattr(suffixes, "entry_points", lambda group: [point] if group == suffixes.GROUP else [])
        suffixes.installed_formats.cache_clear()

    install()
    yield install
    monkeypatch.undo()
    suffixes.installed_formats.cache_clear()


def layout() -> FileLayout:
    return FileLayout(Read(), {"text": "text", "label": "label"})


def test_it_is_read_in_memory_compressed_and_as_a_stream(entry):
    lines = "".join(f"text:film {number}\tlabel:{number % 2}\n" for number in range(3000))
    Path("a.ltsv").write_text("\n" + lines)
    Path("b.ltsv.gz").write_bytes(gzip.compress(lines.encode()))
    for path in ("a.ltsv", "b.ltsv.gz"):
        table = layout().read(path)
        assert len(table) == 3000
        assert table.column("text", "text")[2999] == "film 2999"
    index = read_index(["a.ltsv"], layout(), "label")
    assert index.rows.tolist() == [1024, 1024, 952]
    assert {label: own.rows for label, own in index.labels.items()} == {"0": 1500, "1": 1500}
    reader = Reader(index, layout(), ["text", "label"])
    assert next(reader.read(2, 950)) == ("film 2998", "0")
    reader.close()


def test_predict_reads_it_and_a_missing_file_is_no_text(entry):
    Path("a.ltsv").write_text("text:a film\ttime:3\n")
    Path("b.ltsv.gz").write_bytes(gzip.compress(b"text:a film\n"))
    data = TextData(make_recipe({"data": {"files": {"train": "a.ltsv"}, "text": "text"}}), labelled=False)
    for name in ("a.ltsv", "b.ltsv.gz"):
        ((texts, _),) = text_chunks(data, read_source(name), 0, 8)
        assert texts == ["a film"]
    with expect_problem("file-missing no.ltsv", UsageError):
        read_source("no.ltsv")


def test_errors_name_the_file_the_line_and_the_reader(entry):
    Path("a.ltsv").write_text("text:a\tlabel:b\nno pair\n")
    with expect_problem("invalid-row a.ltsv 2", RecipeError):
        layout().read("a.ltsv")
    entry("ltsv_reader:number")
    with expect_problem("wrong-type ltsv_reader:number", PluginError):
        reader_of(".ltsv")
    entry("ltsv_reader:missing")
    with expect_problem("import-failed AttributeError", PluginError):
        reader_of(".ltsv")
