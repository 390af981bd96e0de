"""Broken and odd data files are refused at the right place, or read right: in memory, as a stream and to predict."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from broken_files import FILES
from data_files import DataFile
from data_helpers import named_rows, problem_of, text_data

from fastloop.errors import FastloopError
from fastloop_plugins.text.chunks import text_chunks
from fastloop_plugins.text.streaming.split import HEAD

GOOD = [name for name, file in FILES.items() if file.rows is not None]
BROKEN = [name for name, file in FILES.items() if file.rows is None]
LISTS = "no-streaming"
"""Code of the error for a JSON list, which no stream reads."""


def predicted(file: DataFile) -> list[str]:
    """The texts of a file to predict, by the options of a training file."""
    data = text_data(file.path, **file.data)
    return [text for texts, _ in text_chunks(data, Path(file.path), 0, 8) for text in texts]


def first_streamed(file: DataFile) -> list[str] | None:
    """The first texts of a file as a stream, and others after them; None: a list, which no stream reads."""
    try:
        return list(text_data(file.path, streaming=True, shuffle_buffer=0, **file.data).load()["train"].texts)
    except FastloopError as error:
        if error.problem.code != LISTS:
            raise
        return None


@pytest.mark.parametrize("name", GOOD)
def test_an_odd_file_is_read_as_it_is(name):
    file = FILES[name]
    Path(file.path).write_bytes(file.content)
    limit = csv.field_size_limit()
    assert named_rows(text_data(file.path, **file.data)) == file.rows
    assert csv.field_size_limit() == limit
    texts = [text for text, _ in file.rows]
    assert predicted(file) == texts
    first = first_streamed(file)
    if first is not None:
        assert first[: min(len(texts), HEAD)] == texts[:HEAD]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_place(name):
    file = FILES[name]
    Path(file.path).write_bytes(file.content)
    problem = problem_of(file.path, **file.data)
    assert (problem.place, problem.code) == (f"{file.path}{file.place}", file.code)
    with pytest.raises(FastloopError) as streamed:
        text_data(file.path, streaming=True, **file.data).load()
    expected = file.streamed or ("empty-file" if file.code == "empty-split" else file.code)
    assert streamed.value.problem.code in (expected, LISTS)
    if file.is_predicted:
        predicted(file)
    else:
        with pytest.raises(FastloopError) as refused:
            predicted(file)
        assert (refused.value.problem.place, refused.value.problem.code) == (problem.place, problem.code)


@pytest.mark.parametrize("name", [name for name in BROKEN if FILES[name].remedy])
def test_the_proposed_option_reads_the_file(name):
    file = FILES[name]
    Path(file.path).write_bytes(file.content)
    proposals = problem_of(file.path, **file.data).proposals
    for key, value in file.remedy.items():
        written = f"[{','.join(value)}]" if isinstance(value, list) else value
        assert key in file.data.get("read", {}) or f"data.read.{key}={written}" in proposals
    assert named_rows(text_data(file.path, **file.data | {"read": file.remedy})) == file.mended


def test_no_file_is_left_out():
    assert len(FILES) > 300
