"""Blocks of tokens across streamed texts: equal to those in memory for any row groups, resumed exactly.

Modules:
    plugins/fastloop_plugins/text/streaming/blocks.py
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import tokenizer
from streaming_helpers import data_section, ids_by_step, loader, record_readers, samples_of, write_lines, write_parquet
from text_helpers import TINY_GPT, make_run

from fastloop.errors import DataError, RecipeError
from fastloop.run import Run
from fastloop.testing import expect_problem
from fastloop_plugins._cache import tokens_kept_in
from fastloop_plugins.rows import content_hashes
from fastloop_plugins.rows import index as row_groups
from fastloop_plugins.rows.index import Index, Reader
from fastloop_plugins.text.streaming import split as _streaming
from fastloop_plugins.text.streaming.blocks import index_blocks

MODEL = {"config": TINY_GPT | {"n_positions": 64}, "tokenizer": "words"}


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    """All readers of texts that are made from here on, to count tokens or to make blocks."""
    return record_readers(monkeypatch, _streaming)


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of no word to 90 words, most of them short."""
    draw = np.random.default_rng(seed)
    words = np.array(["fine", "dull", "film", "bore", "lovely", "number"])
    return [{"text": " ".join(draw.choice(words, int(draw.geometric(0.05)) - 1))} for _ in range(count)]


def write(table: list[dict[str, Any]], group: int) -> list[str]:
    """Three files of row groups of ``group`` rows, and a tokenizer of their words."""
    third = len(table) // 3
    tokenizer(path=write_lines("all.jsonl", table)).save_pretrained("words")
    return [
        write_parquet("a.parquet", table[:third], group),
        write_lines("b.jsonl", table[third : 2 * third]),
        write_parquet("c.parquet", table[2 * third :], group),
    ]


def stream(files: Any, **changes: Any) -> Run:
    """A run on blocks of ``files``."""
    return make_run("causal-lm", MODEL, data_section(files, {"blocks": True} | changes))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "size"), [(1, 32), (2, 16), (7, 31), (50, 16), (1000, 32)])
def test_blocks_equal_those_in_memory_for_any_row_groups(group, size, monkeypatch):
    monkeypatch.setattr(row_groups, "GROUP", group)
    files = write(texts(120), group)
    memory = make_run("causal-lm", MODEL, data_section(files, {"streaming": None, "max_length": size})).datasets[
        "train"
    ]
    run = stream(files, shuffle_buffer=0, max_length=size)
    assert samples_of(run.datasets["train"]) == samples_of(memory)
    shuffled = stream(files, max_length=size).datasets["train"]
    found = dict(chain.from_iterable(shuffled.read_ranges(0, [range(len(memory))])))
    assert [found[number]["input_ids"].tolist() for number in range(len(memory))] == [
        row["input_ids"] for row in samples_of(memory)
    ]


def test_a_group_without_a_block_of_its_own_is_skipped():
    index = Index(["a"], np.zeros(5, np.int64), np.arange(5), np.full(5, 3))
    assert index_blocks(index, np.array([5, 2, 1, 0, 26]), [0], 8, "data").rows.tolist() == [1, 0, 0, 0, 4]
    assert index_blocks(index, np.array([8, 8, 1, 9, 0]), [0, 2], 8, "data").rows.tolist() == [1, 1, 1, 1, 0]
    # one token is no block
    assert index_blocks(index, np.array([8, 8, 1, 0, 0]), [0], 8, "data").rows.tolist() == [1, 1, 0, 0, 0]
    with expect_problem("too-few-tokens", RecipeError):
        index_blocks(index, np.array([1, 0, 0, 0, 0]), [0], 8, "data")


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 0), (2, 2)])
def test_any_number_of_readers_gives_the_same_steps(world_size, workers):
    run = stream(write(texts(300), 20))
    assert ids_by_step(run, world_size, workers) == ids_by_step(run)
    assert ids_by_step(run, world_size, workers, epoch=1, start=64) == ids_by_step(run, epoch=1)[4:]


@pytest.mark.slow
def test_a_resumed_run_reads_a_part_of_the_texts(readers, monkeypatch):
    monkeypatch.setattr(row_groups, "GROUP", 20)
    run = stream(write(texts(3000), 20), shuffle_buffer=32)
    dataset = run.datasets["train"]
    size = len(dataset)
    whole = dict(enumerate(chain.from_iterable(dataset.read_ranges(2, (range(n, n + 1) for n in range(size))))))
    readers.clear()
    start = size * 9 // 10
    for position, (number, sample) in enumerate(
        chain.from_iterable(dataset.read_ranges(2, [range(start, size)])), start
    ):
        assert number == whole[position][0]
        assert sample["input_ids"].tolist() == whole[position][1]["input_ids"].tolist()
    (reader,) = readers
    assert reader.rows_read < 3000 * 0.2


@pytest.mark.slow
def test_a_mix_cuts_the_blocks_of_each_source_by_itself():
    files = write(texts(300), 20)
    run = stream(files, mix=[1, 1, 2], shuffle_buffer=40)
    memory = [
        {
            tuple(row["input_ids"])
            for row in samples_of(
                make_run("causal-lm", MODEL, data_section(path, {"streaming": None})).datasets["train"]
            )
        }
        for path in files
    ]
    dataset = run.datasets["train"]
    order = dataset.make_order()
    for position, (_, sample) in enumerate(chain.from_iterable(dataset.read_ranges(0, [range(len(dataset))]))):
        assert tuple(sample["input_ids"].tolist()) in memory[order.locate(0, position).source]


def counted_rows(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Rows of each line that announces that tokens are counted."""
    return [record.args[0] for record in caplog.records if record.module == "blocks"]


@pytest.mark.slow
def test_the_tokens_are_counted_once_with_a_cache(readers, caplog, monkeypatch):
    monkeypatch.setattr(content_hashes, "SETTLED", -1.0)  # files of a test are new
    files = write(texts(120), 20)
    caplog.set_level("INFO", logger="fastloop")
    with tokens_kept_in(Path("cache")):
        first = samples_of(stream(files).datasets["train"])
        assert counted_rows(caplog) == [120]
        assert sum(reader.rows_read for reader in readers) > 240  # the first rows, all rows, and the samples
        caplog.clear()
        again = stream(files)
        assert counted_rows(caplog) == []
        assert samples_of(again.datasets["train"]) == first
        (counts,) = Path("cache").glob("*/tokens.npy")
        counts.write_bytes(counts.read_bytes()[:-4])
        assert samples_of(stream(files).datasets["train"]) == first
        assert counted_rows(caplog) == [120]
        assert caplog.text.count("is damaged") == 1
        caplog.clear()
        table = texts(120, seed=1)
        assert samples_of(stream(write(table, 20)).datasets["train"]) != first
        assert counted_rows(caplog) == [120]


@pytest.mark.slow
def test_texts_that_were_changed_after_the_start_are_an_error():
    table = texts(90)
    run = stream(write(table, 20))
    text = next(row["text"] for row in table[30:60] if row["text"].count(" ") > 2)
    file = Path("b.jsonl")
    before = file.stat()
    file.write_text(file.read_text().replace(text, text.replace(" ", "_", 2)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a change that the file's times do not show
    with expect_problem("data-changed b.jsonl tokens", DataError):
        list(loader(run).batches())
