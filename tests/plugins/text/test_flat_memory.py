"""Text data takes no memory for each row: its numbers are in mapped files, and its values too.

Modules:
    plugins/fastloop_plugins/rows/split_rows.py
"""

from __future__ import annotations

import json
import random
import threading
import tracemalloc
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long_form import LONG
from text_helpers import TINY, make_run

from fastloop import Plugin, hookimpl
from fastloop_plugins import _mapped
from fastloop_plugins.rows import column
from fastloop_plugins.rows.held_out import DRAW, draw, hold_out
from fastloop_plugins.text.repeats import first_rows

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


class Peak(Plugin):
    """The peak of the memory that Python and numpy allocate in ``build_datasets``."""

    name = "peak"
    bytes = 0

    @hookimpl(wrapper=True, tryfirst=True)
    def build_datasets(self) -> Generator[None, Any, Any]:
        tracemalloc.start()
        datasets = yield
        self.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return datasets


@dataclass
class Kind:
    """Text data of a task, as rows of numbers."""

    task: str
    row: Callable[[int], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: TINY)


def label_of(number: int) -> str:
    return "no" if number % 2 else "yes"


def chat_of(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"what is {number}"}
    answer = {"role": "assistant", "content": f"a number, {number}", "name": "ann"}
    return {"messages": [question, answer]}


KINDS = {
    "classes": Kind(
        "text-classification",
        lambda number: {"text": f"film {number}", "label": label_of(number)},
        {"label": "label", "deduplicate": True, "drop": [{"column": "text", "equals": "film 7"}]},
    ),
    "renamed": Kind(
        "text-classification",
        lambda number: {"text": f"film {number}", "label": label_of(number) if number % 7 else "-"},
        {"label": "label", "label_map": {"yes": "YES", "-": None}},
    ),
    "numbers": Kind(
        "text-classification",
        lambda number: {"text": f"film {number}", "label": number / 7},
        {"label": "label", "label_type": "number"},
    ),
    "sets": Kind(
        "text-classification",
        lambda number: {"text": f"film {number}", "label": ["a", "b"][: number % 3]},
        {"label": "label", "label_type": "classes"},
    ),
    "texts": Kind("causal-lm", lambda number: {"text": f"line {number}"}, model=GPT2),
    "chats": Kind("causal-lm", chat_of, {"messages": "messages", "chat_template": "chatml", "max_length": 64}, GPT2),
    "tags": Kind(
        "token-classification", lambda number: {"words": ["film", str(number)], "tags": ["O", "B"]}, {"words": "words"}
    ),
    "pairs": Kind(
        "seq2seq",
        lambda number: {"text": f"add {number}", "target": str(number)},
        {"target": "target", "max_target_length": 16},
        T5,
    ),
}


@pytest.mark.slow  # each measures 10,000 rows
@pytest.mark.parametrize("name", KINDS if LONG else ["texts", "tags"])
def test_no_number_and_no_object_stays_in_memory_for_a_row(monkeypatch, name):
    """Through reading, labels, held-out rows, repeated rows, a limit, tokens and samples."""
    monkeypatch.setattr(column, "CURRENT", threading.local())
    monkeypatch.setattr(column, "IN_MEMORY", 100)
    monkeypatch.setattr(_mapped, "IN_MEMORY", 100)
    monkeypatch.setattr(_mapped, "AT_ONCE", 500)
    kind = KINDS[name]
    peaks = []
    for count in (50, 6000, 10_000):  # the first run imports modules
        rows = [json.dumps(kind.row(number)) for number in range(count)]
        Path("train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        data = {"files": {"train": "train.jsonl"}, "max_length": 24, "limit": {"train": count // 2}, **kind.options}
        peak = Peak()
        run = make_run(kind.task, {"config": kind.model, "tokenizer": {"kind": "byte"}}, data, [peak])
        assert len(run.datasets["validation"]) > 0
        peaks.append(peak.bytes)
    assert (peaks[2] - peaks[1]) / 4000 < 24, "bytes of a row: a number in a list takes 36"


@pytest.fixture(params=[_mapped.IN_MEMORY, 0], ids=["in memory", "mapped"])
def small_parts(request, monkeypatch):
    """Whether arrays are mapped; they are computed in small parts."""
    monkeypatch.setattr(_mapped, "IN_MEMORY", request.param)
    monkeypatch.setattr(_mapped, "AT_ONCE", 7)
    return request.param == 0


@pytest.mark.parametrize("size", [1, 7, 100])
def test_arrays_equal_those_of_numpy(small_parts, size):
    chance = np.random.default_rng(0)
    values = chance.integers(0, 9, (size, 2)).astype(np.float32)
    ids = chance.integers(0, size, size)
    mask = values[:, 0] > 4
    growing = _mapped.GrowingArray(np.float32, 2)
    for span in _mapped.spans(size):
        growing.extend(values[span])
    pairs = [
        (_mapped.take(values, ids), values[ids]),
        (_mapped.flatnonzero(mask), np.flatnonzero(mask)),
        (_mapped.cumsum(ids), np.cumsum(ids)),
        (_mapped.concatenate([values, values[:1]]), np.concatenate([values, values[:1]])),
        (_mapped.convert(values, np.int64), values.astype(np.int64)),
        (growing.finish(), values),
    ]
    for ours, expected in pairs:
        assert ours.dtype == expected.dtype
        assert np.array_equal(ours, expected)
        assert (_mapped.mapping_of(ours) is not None) == (small_parts and ours.size > 0)


def test_rows_of_ids_are_put_end_to_end(small_parts):
    rows = [[1, 2, 3], [], [4], list(range(20)), [5, 6]]
    ids, lengths = _mapped.flat(iter(rows))
    assert ids.tolist() == [token for row in rows for token in row]
    assert lengths.tolist() == [len(row) for row in rows]
    parts = list(_mapped.row_spans(np.cumsum(lengths)))
    assert [number for part, _ in parts for number in range(len(rows))[part]] == list(range(len(rows)))
    for part, place in parts:
        assert ids[place].tolist() == [token for row in rows[part] for token in row]


def test_an_array_that_cannot_be_written_is_an_error_with_its_folder(monkeypatch):
    monkeypatch.setattr(_mapped, "IN_MEMORY", 0)
    monkeypatch.setattr(_mapped.tempfile, "tempdir", "nowhere")
    for make in (lambda: _mapped.zeros(9, np.int64), lambda: _mapped.GrowingArray(np.int64).extend([1])):
        with pytest.raises(Exception, match=r"nowhere.*TMPDIR"):
            make()


@pytest.mark.parametrize("total", [1, 5, 21, 22, 300, 4001])
def test_drawn_rows_are_those_of_random_sample(total):
    for count in {1, total // 50 + 1, total // 4 + 1, total // 2 + 1, total}:
        expected = sorted(random.Random(DRAW).sample(range(total), count))
        assert draw(total, count).tolist() == expected


def test_held_out_rows_are_those_of_random_sample():
    train, held = hold_out(1000, 0.1, None, "data")
    assert held.tolist() == sorted(random.Random(DRAW).sample(range(1000), 1000)[:100])
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(1000))


def test_the_first_of_equal_rows_is_found(small_parts):
    marks = np.random.default_rng(0).integers(0, 40, 60).astype(np.uint64)
    assert first_rows(marks).tolist() == [marks.tolist().index(mark) for mark in marks.tolist()]
