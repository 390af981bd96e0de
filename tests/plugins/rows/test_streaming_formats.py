"""The formats that ``data.streaming`` reads: the rows of the data in memory, on any readers, and an exact resume.

Modules:
    plugins/fastloop_plugins/rows/index.py
    plugins/fastloop_plugins/rows/kept_results.py
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import fsspec
import pyarrow
import pytest
from checkpoint_helpers import tokenizer
from format_files import ROWS, table, write
from pyarrow import parquet
from streaming_helpers import (
    classify,
    generate,
    ids_by_step,
    loader,
    record_readers,
    samples_of,
    write_lines,
)

from fastloop.errors import DataError, RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins._cache import tokens_kept_in
from fastloop_plugins.rows import content_hashes, index
from fastloop_plugins.rows.index import Reader
from fastloop_plugins.rows.lines import LineFile, Lines
from fastloop_plugins.text.streaming import split as _streaming

SEEKABLE = ("a.arrow", "a.parquet", "a.jsonl", "a.csv", "a.tsv")


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups and batches of a few rows."""
    monkeypatch.setattr(index, "GROUP", 20)
    monkeypatch.setattr(index, "ROWS_AT_ONCE", 7)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    """All readers of files that are made from here on."""
    return record_readers(monkeypatch, _streaming)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["a.parquet", "a.csv.gz"])
def test_a_format_gives_the_tokens_of_memory_and_resumes_exactly(path):
    """The rows of every format: ``tests/honesty/test_data_rows.py``."""
    write(path, content := table())
    tokenizer(path=write_lines("all.jsonl", content)).save_pretrained("words")
    memory = classify(path, TOKENIZER="words", streaming=None).datasets["train"]
    assert samples_of(classify(path, TOKENIZER="words", shuffle_buffer=0).datasets["train"]) == samples_of(memory)
    run = classify(path, TOKENIZER="words", shuffle_buffer=30)
    steps = ids_by_step(run, epoch=1)
    assert sorted(chain.from_iterable(steps)) == list(range(ROWS)) != list(chain.from_iterable(steps))
    assert ids_by_step(run, 2, 1, epoch=1) == steps
    for start in (16, 112, 192):
        assert ids_by_step(run, 2, 0, epoch=1, start=start) == steps[start // 16 :]
    found = dict(chain.from_iterable(run.datasets["train"].read_ranges(1, [range(160, ROWS)])))
    assert all(found[number]["input_ids"].tolist() == memory[number]["input_ids"].tolist() for number in found)


@pytest.mark.slow
@pytest.mark.parametrize("gap", ["\n", "\n\n"], ids=["lines", "paragraphs"])
def test_a_txt_file_gives_the_samples_of_memory_and_resumes_exactly(gap):
    Path("a.txt").write_text(gap.join(row["text"].replace("\n", " ") for row in table()))
    for blocks in (True, None):
        run = generate("a.txt", blocks=blocks, shuffle_buffer=0)
        if blocks:
            assert samples_of(run.datasets["train"]) == samples_of(generate("a.txt", streaming=None).datasets["train"])
        assert len(run.datasets["train"]) == ROWS or blocks
    run = generate("a.txt", shuffle_buffer=30)
    steps = ids_by_step(run, epoch=1)
    assert sorted(chain.from_iterable(steps)) == list(range(ROWS))
    assert ids_by_step(run, 2, 1, epoch=1, start=112) == steps[7:]


@pytest.mark.slow
@pytest.mark.parametrize("path", SEEKABLE)
def test_a_resumed_run_seeks_where_the_format_permits_it(path, readers):
    run = classify(write(path, table(1600)), shuffle_buffer=40)
    readers.clear()
    for _ in run.datasets["train"].read_ranges(0, [range(1440, 1600)]):
        pass
    assert readers[-1].rows_read <= 160 + 40 + 5 * 20  # the buffer, and a row group of each lane


@pytest.mark.slow
def test_a_compressed_file_is_decompressed_up_to_the_position(monkeypatch):
    taken: list[Lines] = []
    run = classify(write("a.jsonl.gz", table(1600)), shuffle_buffer=0)
    opened = Lines.__init__

    def record(lines: Lines, file: LineFile, start: int) -> None:
        opened(lines, file, start)
        taken.append(lines)

    monkeypatch.setattr(Lines, "__init__", record)
    for _ in run.datasets["train"].read_ranges(0, [range(800, 816)]):
        pass
    assert 816 <= (max(lines.number for lines in taken) + 1) // 2 < 900  # every second line is empty


@pytest.mark.slow
def test_formats_can_be_read_side_by_side_and_at_urls():
    content, system = table(), fsspec.filesystem("memory")
    for number, name in enumerate(["a.parquet", "b.jsonl.gz", "c.csv", "d.jsonl"]):
        write(name, content[number * 50 : number * 50 + 50])
        system.pipe(f"/shards/{name}", Path(name).read_bytes())
    try:
        run = classify(["memory://shards/*.parquet", "memory://shards/b.jsonl.gz", "memory://shards/c.csv", "d.jsonl"])
        assert ids_by_step(run, 2, 1) == ids_by_step(classify(["a.parquet", "b.jsonl.gz", "c.csv", "d.jsonl"]))
    finally:
        system.rm("/shards", recursive=True)


@pytest.mark.slow
def test_numbers_in_csv_files_are_labels():
    content = [{"text": f"number {number}", "label": str(number % 3)} for number in range(60)]
    write("a.csv", content)
    run = classify("a.csv")
    assert [run.datasets["train"][number]["label"] for number in range(4)] == [0, 1, 2, 0]
    number = classify("a.csv", label_type="number")
    assert [float(number.datasets["train"][row]["label"]) for row in range(4)] == [0, 1, 2, 0]


def test_files_that_cannot_be_read_are_named_at_the_start():
    for name, content, expected in (
        ("a.csv", "text,label\na,b\n" * 2, "invalid-row a.csv, line 3: text,"),
        ("b.csv", "text,label\na,b\nc\n", "invalid-row b.csv, line 3: 1 2"),
        ("c.csv", 'text,label\n"a,b\n', "invalid-row c.csv, line 2: data.read.quoting=none"),
        ("d.csv", "a,b\nc,d\n", "unknown-column d.csv: 'text'"),
        ("e.jsonl.gz", "no gzip", "file-unreadable e.jsonl.gz: .jsonl"),
        ("g.tar", "", "unknown-format g.tar: '.tar' data.name=FOLDER"),
        ("h.tar.gz", "", "unknown-format h.tar.gz: '.gz'"),
        ("i.json", '[{"text": "a", "label": "b"}]', "no-streaming i.json:"),
        ("f.jsonl", '{"text": "a", "label": "b"}\n{"text"\n', "invalid-row f.jsonl, line 2: JSON"),
    ):
        Path(name).write_text(content)
        with expect_problem(expected, RecipeError):
            classify(name)


def damage(path: str, group: int = 5) -> None:
    """Change bytes in the page of texts of a row group, as a disk does that loses them: the file keeps its times."""
    before = Path(path).stat()
    columns = parquet.ParquetFile(path).metadata.row_group(group)
    column = next(
        columns.column(index) for index in range(columns.num_columns) if columns.column(index).path_in_schema == "text"
    )
    content = bytearray(Path(path).read_bytes())
    end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    for place in range(end - 40, end):
        content[place] ^= 0xFF
    Path(path).write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_damaged_page_found_at_the_start_is_named():
    damage(path := write("a.parquet", table()))
    with expect_problem("file-unreadable a.parquet", RecipeError):
        classify(path, streaming=None)
    with expect_problem("file-unreadable a.parquet 5", DataError) as caught:
        classify(path)
    assert caught.value.__cause__ is None  # else the command line prints its traceback


@pytest.mark.parametrize("streaming", [True, None])
def test_a_page_with_another_checksum_is_refused(streaming):
    """Without compression, a changed page is readable text."""
    names = pyarrow.Table.from_pylist(table())
    parquet.write_table(
        names, "a.parquet", row_group_size=20, compression="none", write_page_checksum=True, use_dictionary=False
    )
    damage("a.parquet")
    with expect_problem("file-unreadable a.parquet CRC", (DataError, RecipeError)):
        classify("a.parquet", streaming=streaming)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_page_that_is_damaged_while_training_is_named(workers):
    run = classify(path := write("a.parquet", table()))
    damage(path)
    read = loader(run, workers=workers)
    with expect_problem("file-unreadable a.parquet: 5", DataError) as caught:
        list(read.batches())
    read.close()
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_index_is_kept_with_a_cache(monkeypatch):
    monkeypatch.setattr(content_hashes, "SETTLED", -1.0)  # files of a test are new
    files = [write("a.csv", table()[:100]), write("b.jsonl", table()[100:])]
    with tokens_kept_in(Path("cache")):
        first = ids_by_step(classify(files))
        with monkeypatch.context() as patch:
            patch.setattr(index, "_scan", None)  # is not called again
            assert ids_by_step(classify(files)) == first
        write("b.jsonl", table()[150:])
        assert len(ids_by_step(classify(files))) < len(first)


@pytest.mark.slow
def test_an_index_of_a_file_that_may_have_changed_is_made_again(monkeypatch):
    file = Path(write("a.csv", table()))
    content = file.read_bytes()
    monkeypatch.setattr(content_hashes, "SETTLED", 60.0)
    with tokens_kept_in(Path("cache")):
        classify([file.name])
        assert not list(Path("cache").glob("*/index.json")), "the file has just been written"
        monkeypatch.setattr(content_hashes, "SETTLED", -1.0)
        assert set(classify([file.name]).model.config.label2id) == {"bad", "good"}
        before = file.stat()
        file.write_bytes(content.replace(b"\nbad,", b"\nodd,"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert set(classify([file.name]).model.config.label2id) == {"odd", "good"}, "its size and time are the same"


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"groups": [[1, 2]]}'])
def test_a_damaged_index_is_made_again(content, monkeypatch, caplog):
    monkeypatch.setattr(content_hashes, "SETTLED", -1.0)
    files = [write("a.csv", table())]
    with tokens_kept_in(Path("cache")):
        first = ids_by_step(classify(files))
        (kept,) = Path("cache").glob("*/index.json")
        whole = kept.read_text()
        kept.write_text(content)
        assert ids_by_step(classify(files)) == first
    assert caplog.text.count("is damaged") == 1
    assert kept.read_text() == whole


@pytest.mark.slow
def test_a_csv_file_that_was_changed_after_the_start_is_an_error():
    run = classify(write("a.csv", table()))
    write("a.csv", table()[:50])
    with pytest.raises((DataError, RecipeError)):
        list(loader(run).batches())
