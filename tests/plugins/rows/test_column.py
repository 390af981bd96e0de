"""Columns of rows in a temporary file: the same values as a list, in flat memory.

Modules:
    plugins/fastloop_plugins/rows/column.py
"""

from __future__ import annotations

import multiprocessing
import pickle
import random
import sys
import threading

import numpy as np
import pytest

from fastloop.errors import RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.rows import column
from fastloop_plugins.rows.column import Column, in_blocks, keep_rows


@pytest.fixture(autouse=True)
def _with_a_store_of_its_own(monkeypatch):
    """Columns of an earlier test may be alive, in cycles that nothing has collected yet."""
    monkeypatch.setattr(column, "CURRENT", threading.local())


@pytest.mark.parametrize("in_memory", [column.IN_MEMORY, 100])
def test_a_column_equals_a_list(monkeypatch, in_memory):
    monkeypatch.setattr(column, "IN_MEMORY", in_memory)
    chance = random.Random(0)
    for size in (0, 1, 1024, 4025):
        values = [chance.choice(["a", "\ud83d", 1, 1.0, True, None, [{"b": 2}]]) for _ in range(size)]
        ids = np.array(sorted(chance.choices(range(size), k=size // 2)), np.int64)
        every = Column(values)
        some = keep_rows({"text": every}, ids)["text"]
        for column_, expected in ((every, values), (some, [values[index] for index in ids])):
            assert list(map(repr, column_)) == list(map(repr, expected))
            assert repr(column_[:]) == repr(expected)
            assert list(pickle.loads(pickle.dumps(column_))) == expected
            assert repr(column_[-3::2]) == repr(expected[-3::2])
            assert [column_[index] for index in range(len(expected))] == expected
            half = np.arange(0, len(expected), 2)
            kept = keep_rows(keep_rows({"text": column_}, half), half[: len(half) // 2])["text"]
            assert list(kept) == expected[::4][: len(half) // 2]
            assert [value for _, (block,) in in_blocks([column_]) for value in block] == expected
            with pytest.raises(IndexError):
                column_[len(expected)]


def test_columns_share_the_places_of_their_rows():
    first = {"text": Column("abc"), "label": Column([0, 1, 2])}
    twice = keep_rows(keep_rows(first, np.array([0, 2])), np.array([1]))
    assert [list(column_) for column_ in twice.values()] == [["c"], [2]]
    assert twice["text"].ids is twice["label"].ids


def check_rows(values: Column, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        row = chance.randrange(len(values))
        assert values[row] == f"row {row}"


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes")
def test_forked_processes_read_a_column_at_the_same_time(monkeypatch):
    monkeypatch.setattr(column, "IN_MEMORY", 100)
    values = Column(f"row {number}" for number in range(5000))
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=check_rows, args=(values, seed)) for seed in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0, 0, 0]


def check_new_columns(seed: int) -> None:
    for number in range(20):
        values = [f"process {seed}, column {number}, row {row}" for row in range(300)]
        assert list(Column(values)) == values


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes")
def test_forked_processes_write_columns_of_their_own(monkeypatch):
    """Beside a column of their parent, whose file they have inherited."""
    monkeypatch.setattr(column, "IN_MEMORY", 100)
    values = Column(f"row {number}" for number in range(5000))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=check_new_columns, args=(seed,)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    values.append_block(["last"])
    assert list(values) == [*(f"row {number}" for number in range(5000)), "last"]


def test_values_that_cannot_be_pickled_stay_as_they_are():
    value = (lambda: 1, "text")
    assert list(Column([value])) == [value]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(monkeypatch):
    monkeypatch.setattr(column, "IN_MEMORY", 100)
    monkeypatch.setattr(column.tempfile, "tempdir", "nowhere")
    with expect_problem("file-not-writable TMPDIR", RecipeError):
        Column("text" for _ in range(1000))
