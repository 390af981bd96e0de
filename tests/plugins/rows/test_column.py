"""Columns of rows in a temporary file: the same values as a list, in flat memory."""

from __future__ import annotations

import json
import pickle
import random
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from data_helpers import text_data

from fastloop.errors import RecipeError
from fastloop_plugins.rows import column
from fastloop_plugins.rows.column import Column, in_blocks

SIZE = 500
"""Characters of a text."""


@pytest.fixture(autouse=True)
def _with_a_store_of_its_own(monkeypatch):
    """Columns of an earlier test may be alive, in cycles that nothing has collected yet."""
    monkeypatch.setattr(column, "CURRENT", threading.local())


@pytest.mark.parametrize("in_memory", [column.IN_MEMORY, 100])
def test_a_column_equals_a_list(monkeypatch, in_memory):
    monkeypatch.setattr(column, "IN_MEMORY", in_memory)
    chance = random.Random(0)
    for sizes in ([0], [1], [1024], [1025, 0, 3000], [5, 5, 5]):
        lists = [[chance.choice(["a", "\ud83d", 1, 1.0, True, None, [{"b": 2}]]) for _ in range(n)] for n in sizes]
        parts = [Column(values) for values in lists]
        kept = [np.array(sorted(chance.choices(range(n), k=n // 2)), np.int64) for n in sizes]
        chosen = [part.keep(ids) for part, ids in zip(parts, kept, strict=True)]
        fewer = [[values[index] for index in ids] for values, ids in zip(lists, kept, strict=True)]
        for given, expected in ((parts, lists), (chosen, fewer), ([*chosen, parts[0]], [*fewer, lists[0]])):
            found, flat = Column.join(given), [value for values in expected for value in values]
            assert list(map(repr, found)) == list(map(repr, flat))
            assert repr(found[:]) == repr(flat)
            assert list(pickle.loads(pickle.dumps(found))) == flat
            assert repr(found[-3::2]) == repr(flat[-3::2])
            assert [found[index] for index in range(len(flat))] == flat
            half = np.arange(0, len(flat), 2)
            assert list(found.keep(half).keep(half[: len(half) // 2])) == flat[::4][: len(half) // 2]
            assert [value for _, (block,) in in_blocks([found]) for value in block] == flat
            with pytest.raises(IndexError):
                found[len(flat)]


def test_values_that_cannot_be_pickled_stay_as_they_are():
    value = (lambda: 1, "text")
    assert list(Column([value])) == [value]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(monkeypatch):
    monkeypatch.setattr(column, "IN_MEMORY", 100)
    monkeypatch.setattr(column.tempfile, "tempdir", "nowhere")
    with pytest.raises(
        RecipeError, match=r"rows cannot be written to a temporary file in nowhere: No such file .*TMPDIR"
    ):
        Column("text" for _ in range(1000))


def test_rows_in_memory_take_a_tenth_of_their_texts(monkeypatch):
    """Labels, held-out rows, repeated rows and a limit included."""
    monkeypatch.setattr(column, "IN_MEMORY", 100)
    chance, peaks = random.Random(0), []
    for count in (2000, 6000):
        with Path("train.jsonl").open("w") as file:
            for number in range(count):
                row = {"text": chance.randbytes(SIZE // 2).hex(), "label": "no" if number % 2 else "yes"}
                file.write(json.dumps(row) + "\n")
        tracemalloc.start()
        splits = text_data("train.jsonl", validation_fraction=0.1, limit={"train": count // 2}, deduplicate=True).load()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (len(splits["train"]), len(splits["validation"])) == (count // 2, count // 10)
    assert (peaks[1] - peaks[0]) / 4000 < SIZE / 10
