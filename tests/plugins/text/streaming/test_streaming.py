"""``data.streaming``: every row once an epoch on any number of readers, resume without a second read, and refusals.

Modules:
    plugins/fastloop_plugins/rows/order.py
    plugins/fastloop_plugins/text/streaming/dataset.py
    plugins/fastloop_plugins/text/streaming/opening.py
    plugins/fastloop_plugins/text/streaming/options.py
    plugins/fastloop_plugins/text/streaming/rows.py
    plugins/fastloop_plugins/text/streaming/split.py
    plugins/fastloop_plugins/text/streaming/windows.py
"""

from __future__ import annotations

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from checkpoint_helpers import tokenizer
from streaming_helpers import (
    NAMES,
    classify,
    generate,
    ids_by_step,
    loader,
    record_readers,
    write_lines,
    write_parquet,
    write_shards,
)
from text_helpers import rows

from fastloop.errors import DataError, RecipeError, UsageError
from fastloop.recipe import Inference, make_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.rows.index import Reader
from fastloop_plugins.rows.order import CYCLE, Order
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.streaming import split as _streaming

ROWS = 403


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    """All readers of files that are made from here on."""
    return record_readers(monkeypatch, _streaming)


@pytest.mark.slow
def test_each_row_comes_once_an_epoch_and_epochs_differ():
    run = classify(write_shards(ROWS))
    epochs = [list(chain.from_iterable(ids_by_step(run, epoch=epoch))) for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert epochs[0] != epochs[1]
    assert run.total_steps == -(-ROWS // 8)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)])
def test_any_number_of_readers_gives_the_same_steps(world_size, workers):
    run = classify(write_shards(ROWS))
    assert ids_by_step(run, world_size, workers) == ids_by_step(run)


@pytest.mark.slow
@pytest.mark.parametrize("start", [16, 160, 208, 400])
def test_a_position_gives_the_rest_of_the_epoch_on_other_readers(start):
    run = classify(write_shards(ROWS))
    assert ids_by_step(run, 2, 1, epoch=1, start=start) == ids_by_step(run, epoch=1)[start // 16 :]


@pytest.mark.slow
def test_samples_equal_those_in_memory():
    files = write_shards(ROWS)
    tokenizer(path="c.jsonl").save_pretrained("words")
    streamed = classify(files, TOKENIZER="words").datasets["train"]
    memory = classify(files, TOKENIZER="words", streaming=None).datasets["train"]
    assert len(streamed) == len(memory) == ROWS
    for number in range(0, ROWS, 10):
        assert streamed[number]["label"] == memory[number]["label"]
        assert streamed[number]["input_ids"].tolist() == memory[number]["input_ids"].tolist()


@pytest.mark.slow
def test_a_resumed_run_reads_only_what_its_windows_had_in_memory(readers):
    table = rows(6400, NAMES)
    run = classify(
        [write_parquet("a.parquet", table[:3200], group=50), write_parquet("b.parquet", table[3200:], group=50)]
    )
    dataset, start = run.datasets["train"], 4800
    readers.clear()
    before = dataset.read_ranges(0, [range(start, start + 16)])
    next(before)
    (reader,) = readers
    assert reader.rows_read <= 100 + 4 * 50  # shuffle_buffer, and a row group of each lane
    for _ in dataset.read_ranges(0, (range(first, first + 16) for first in range(start, 6400, 16))):
        pass
    assert 1600 <= readers[-1].rows_read <= 1600 + 100 + 5 * 50


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "workers"), [(1, 2), (8, 1), (4, 2)])
def test_readers_share_no_row_group(readers, processes, workers):
    """Beside one at each end of a lane, and the rows at an epoch's end that fill no block of each lane."""
    run = classify(write_parquet("a.parquet", rows(6400, NAMES), group=50), lanes=16, BATCH_SIZE=16)
    readers.clear()
    count, size = processes * workers, 16 // processes
    for number in range(count):
        ranges = [range(first, first + size) for first in range(0, 6400, size)][number::count]
        for _ in run.datasets["train"].read_ranges(0, iter(ranges)):
            pass
    counts = [reader.rows_read for reader in readers]
    assert len(counts) == count
    assert sum(counts) <= 6400 + 16 * 2 * 50
    assert max(counts) <= 6400 / count + 16 / count * 2 * 50


def test_rows_move_far_from_where_the_files_have_them():
    order = Order([np.full(100, 100)], None, seed=0, lanes=16, buffer=1600, batch_size=16)
    epoch = [order.locate(0, position) for position in range(10_000)]
    groups, ends = order.group_order(0, 0)
    slots = np.array([place.start + place.offset for place in epoch])
    number = np.searchsorted(ends, slots, side="right")
    found = groups[number] * 100 + slots - (ends[number] - 100)
    assert sorted(found.tolist()) == list(range(10_000))
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.1
    assert np.mean(np.diff(found) == 1) < 0.01
    assert np.mean([len(set(step // 100)) for step in found.reshape(-1, 16)]) > 7  # row groups of a step of 16 samples


def test_a_larger_buffer_mixes_more():
    def run_length(buffer: int) -> float:
        order = Order([np.full(40, 100)], None, seed=0, lanes=4, buffer=buffer, batch_size=16)
        slots = [place.start + place.offset for place in (order.locate(0, position) for position in range(4000))]
        return float(np.mean(np.abs(np.diff(slots)) == 1))

    assert run_length(1) > 0.5 > 0.1 > run_length(400)


@pytest.mark.slow
def test_a_mix_has_its_shares_and_resumes_in_any_source():
    table = rows(600, NAMES)
    files = [write_parquet("a.parquet", table[:200]), write_lines("b.jsonl", table[200:])]
    run = classify(files, mix=[3, 1])
    dataset = run.datasets["train"]

    def read(epoch: int, start: int, end: int) -> list[list[int]]:
        ranges = (range(first, first + 8) for first in range(start, end, 8))
        return [[tuple(sample["input_ids"]) for _, sample in part] for part in dataset.read_ranges(epoch, ranges)]

    whole = read(0, 0, 600)
    assert read(0, 400, 600) == whole[50:]
    assert read(1, 0, 8) != whole[:1]
    order = dataset.make_order()
    share = np.mean([order.locate(epoch, position).source == 0 for epoch in range(20) for position in range(600)])
    assert share == 0.75
    turns = {order.locate(3, position).turn for position in range(600) if order.locate(3, position).source == 0}
    assert max(turns) >= 6  # 200 rows, of which each epoch takes 450


def test_each_pass_over_a_source_of_a_mix_has_all_its_rows():
    order = Order([np.full(10, 30), np.full(5, 100)], [0.5, 0.5], seed=3, lanes=4, buffer=40, batch_size=8)
    places = [order.locate(epoch, position) for epoch in range(4) for position in range(order.size)]
    slots = [place.start + place.offset for place in places if place.source == 0 and place.turn == 1]
    assert sorted(slots) == list(range(300))
    assert sum(order.counts) == CYCLE


def test_files_at_a_url_of_fsspec():
    system, table = fsspec.filesystem("memory"), rows(100, NAMES)
    for path in (write_parquet("a.parquet", table[:60]), write_lines("b.jsonl", table[60:])):
        system.pipe(f"/shards/{path}", Path(path).read_bytes())
    try:
        run = classify(["memory://shards/*.parquet", "memory://shards/b.jsonl"])
        assert ids_by_step(run, 2, 1) == ids_by_step(classify(["a.parquet", "b.jsonl"]))
    finally:
        system.rm("/shards", recursive=True)


def test_files_of_an_http_server():
    pytest.importorskip("aiohttp")
    table = rows(100, NAMES)
    files = [str(path) for path in (write_parquet("a.parquet", table[:60]), write_lines("b.jsonl", table[60:]))]
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            run = classify([f"http://127.0.0.1:{server.server_port}/{file}" for file in files])
            assert ids_by_step(run, 2, 1) == ids_by_step(classify(files))
        finally:
            server.shutdown()


@pytest.mark.slow
def test_numbers_are_labels_of_a_regression():
    table = [row | {"label": number / 7} for number, row in enumerate(rows(50))]
    run = classify(write_parquet("a.parquet", table), label_type="number")
    assert [run.datasets["train"][number]["label"] for number in (0, 20)] == [np.float32(0), np.float32(20 / 7)]


@pytest.mark.slow
def test_classes_include_labels_beyond_the_first_rows(monkeypatch):
    monkeypatch.setattr(_streaming, "HEAD", 16)
    table = rows(200, ("x", "y"))
    table[150]["label"] = "rare"
    run = classify(write_lines("a.jsonl", table))
    names = run.model.config.id2label
    assert sorted(names.values()) == ["rare", "x", "y"]
    assert names[run.datasets["train"][150]["label"]] == "rare"


@pytest.mark.slow
def test_language_model_rows_are_samples_and_long_ones_are_cut(caplog):
    table = [{"text": "word " * (number % 40)} for number in range(200)]
    run = generate(write_parquet("a.parquet", table))
    lengths = [len(run.datasets["train"][number]["input_ids"]) for number in (1, 2, 39)]
    assert lengths[0] < lengths[1] < lengths[2] == 16
    assert_problem(caplog, "texts-cut 16 data.max_length")


@pytest.mark.slow
def test_rows_without_a_token_to_predict_have_no_effect():
    table = [{"text": "" if number < 96 else f"some words {number}"} for number in range(128)]
    run = generate(write_parquet("a.parquet", table, group=16), shuffle_buffer=1, lanes=1)

    def weights(world_size: int) -> list[int]:
        """The targets of each step of 4 rows, of all processes."""
        steps = [loader(run, rank, world_size, batch_size=4).steps() for rank in range(world_size)]
        return [sum(batch.loss_weight for (batch,) in step) for step in zip(*steps, strict=True)]

    assert len(weights(1)) == 32
    assert min(weights(1)) == 0
    assert weights(4) == weights(1), "the same for micro-batches of one row"
    for batch in loader(run).batches():
        assert torch.isfinite(run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs).loss)


@pytest.mark.slow
def test_conversations_stream_with_their_loss_masks():
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number}?"},
                {"role": "assistant", "content": f"It is {number}."},
            ]
        }
        for number in range(64)
    ]
    arguments = {"messages": "messages", "chat_template": "chatml", "max_length": 64}
    path = write_lines("a.jsonl", chats)
    streamed = generate(path, **arguments).datasets["train"]
    memory = generate(path, streaming=None, **arguments).datasets["train"]
    for number in (0, 17, 63):
        assert {name: value.tolist() for name, value in streamed[number].items()} == {
            name: value.tolist() for name, value in memory[number].items()
        }
        assert (streamed[number]["targets"] == -100).any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({"limit": {"train": 5}}, "no-streaming data.limit.train: data.streaming"),
    "blocks": ({"shuffle_block": 64}, "no-streaming data.shuffle_block: data.streaming data.shuffle_buffer"),
    "fraction": ({"validation_fraction": 0.1}, "no-streaming data.validation_fraction: data.streaming"),
    "classes": ({"label_type": "classes"}, "no-streaming data.label_type=classes: data.streaming"),
    "label_map": ({"label_map": {"-": None}}, "no-streaming data.label_map: data.streaming null"),
    "mix": ({"mix": [1.0, 2.0]}, "wrong-weights data.mix: [1.0, 2.0] 1 data.files.train"),
    "small share": (
        {"files": {"train": ["rows.jsonl", "rows.jsonl"]}, "mix": [1.0, 4e-4]},
        "wrong-weights data.mix[1]: 0.04% 1000",
    ),
    "lanes": (
        {"files": {"train": ["rows.jsonl", "more.jsonl"]}, "mix": [1.0, 1.0], "lanes": 64},
        "too-few-rows data.mix: rows.jsonl 40 64 data.lanes",
    ),
    "many labels": (
        {"files": {"train": "many.csv"}},
        "too-many-labels many.csv: 'label' 10000 data.label_type=number",
    ),
    "no files": ({"files": None, "module": "a.py:b"}, "missing-value data.streaming:"),
    "offline": ({"files": None, "name": "somewhere"}, "unreachable-url data.name: 'somewhere'"),
    "json": (
        {"files": {"train": "rows.json"}},
        "no-streaming rows.json: .jsonl",
    ),
    "twice": ({"files": {"train": ["rows.jsonl", "row*.jsonl"]}}, "listed-twice data.files.train: rows.jsonl"),
    "no column": ({"text": "txt"}, "unknown-column 'txt' data.text 'text'"),
    "not streaming": (
        {"streaming": False, "shuffle_buffer": 5},
        "unknown-option data.shuffle_buffer: data.streaming=true",
    ),
    "no such url": ({"files": {"train": "memory://nowhere/*.parquet"}}, "file-missing memory://nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_hold_are_refused_by_name(case):
    changes, expected = REFUSED[case]
    write_lines("rows.jsonl", rows(40, NAMES))
    Path("rows.json").write_text("[]")
    write_lines("more.jsonl", rows(80, NAMES))
    Path("many.csv").write_text("text,label\n" + "".join(f"a,{number}\n" for number in range(10_001)))
    with expect_problem(expected, RecipeError):
        classify("rows.jsonl", **changes)


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (["length-bucketing"], "no-streaming plugins.length-bucketing data.streaming"),
        ([{"folds": {"number": 0, "of": 3}}], "no-streaming plugins.folds data.streaming"),
        (
            [{"text-classification": {"loss": {"name": "focal", "class_weights": "balanced"}}}],
            "no-streaming class_weights",
        ),
    ],
    ids=["length-bucketing", "folds", "class-weights"],
)
def test_plugins_that_need_all_rows_are_refused(plugins, message):
    data = {
        "files": {"train": write_lines("rows.jsonl", rows(8, NAMES))},
        "streaming": True,
        "validation_fraction": 0,
        "label": "label",
    }
    with expect_problem(message, RecipeError):
        TextData(make_recipe({"data": data, "plugins": plugins}, Path("recipe.yaml")), labelled=True)


def test_the_training_split_is_not_evaluated():
    data = {"files": {"train": write_lines("rows.jsonl", rows(8, NAMES))}, "streaming": True, "validation_fraction": 0}
    recipe = make_recipe({"data": data}, Path("recipe.yaml"))
    recipe.inference = Inference(None, "train")
    with expect_problem("unknown-split data.streaming", RecipeError):
        TextData(recipe, labelled=False)


def test_a_row_without_text_names_its_file_and_row():
    table = rows(40, NAMES)
    table[30]["text"] = 7  # type: ignore[assignment]
    with expect_problem("invalid-row a.jsonl 31 'text'", (DataError, UsageError)):
        list(loader(classify(write_lines("a.jsonl", table))).batches())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("write", "name"), [(write_lines, "a.jsonl"), (write_parquet, "a.parquet")])
def test_a_file_that_was_replaced_by_one_of_as_many_rows_is_an_error(write, name, workers):
    table = rows(60, NAMES)
    run = classify(write(name, table))
    read = loader(run, workers=workers)
    assert len(list(read.steps(0))) == 4
    Path(name).chmod(0o600)
    assert len(list(read.steps(1))) == 4, "another mode changes no row"
    Path(write("other", table[::-1])).replace(name)
    with expect_problem(f"data-changed {name} Resume", DataError):
        list(read.steps(2))
    read.close()


def test_a_file_at_a_url_with_fewer_rows_than_at_the_start_is_an_error():
    system = fsspec.filesystem("memory")
    system.pipe("/shards/a.jsonl", Path(write_lines("a.jsonl", rows(60, NAMES))).read_bytes())
    try:
        run = classify("memory://shards/a.jsonl")
        system.pipe("/shards/a.jsonl", Path(write_lines("a.jsonl", rows(20, NAMES))).read_bytes())
        with expect_problem("data-changed 20 60", DataError):
            list(loader(run).batches())
    finally:
        system.rm("/shards", recursive=True)


def test_the_fingerprint_follows_the_rows():
    table = rows(60, NAMES)
    before = classify(write_lines("a.jsonl", table)).datasets["train"].fingerprint()
    assert classify("a.jsonl").datasets["train"].fingerprint() == before
    table[3]["text"] = "another film"
    assert classify(write_lines("a.jsonl", table)).datasets["train"].fingerprint() != before
