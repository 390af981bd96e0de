"""The plugin ``curriculum``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fastloop import FastloopError, Plugin, hookimpl
from fastloop.testing import LANGUAGE, TEXTS, VECTORS, tiny_data, train, write_texts


class Rows:
    """Samples with a key, and an attribute ``difficulty``; each value occurs twice."""

    def __init__(self) -> None:
        self.data = tiny_data(40)
        self.difficulty = [(7 * place) % 20 for place in range(40)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place):
        return self.data[place]


class Order(Plugin):
    """Records the ids of each step."""

    name = "order"

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    @hookimpl
    def before_step(self, batches) -> None:
        self.ids += [place for batch in batches for place in batch.ids]


@pytest.mark.parametrize("descending", [False, True])
def test_each_epoch_is_in_order_and_a_resumed_run_continues_it(tiny_run, descending):
    rows, options = Rows(), {"by": "difficulty", "descending": descending}
    tiny_run([{"curriculum": options}, whole := Order()], data=rows)
    epochs = [whole.ids[:40], whole.ids[40:]]
    for ids in epochs:
        assert sorted(ids) == list(range(40))
        values = [rows.difficulty[place] for place in ids]
        assert values == sorted(values, reverse=descending)
    assert epochs[0] != epochs[1], "equal values are shuffled"
    tiny_run([{"curriculum": options}, first := Order()], data=rows, max_steps=3, output="run")
    tiny_run([{"curriculum": options}, rest := Order()], data=rows, output="run", resume=True)
    assert first.ids + rest.ids == whole.ids


def test_samples_without_the_value_are_refused(tiny_run):
    with pytest.raises(FastloopError, match="TensorDataset has no 'lengths': expected an attribute"):
        tiny_run(["curriculum"])


def column_recipe(task, *plugins, column="hardness", data=()):
    """A recipe with the column ``hardness`` of 40 rows; each value occurs twice."""
    rows = [f"word{place % 7} fine word{place},{place % 2},{(7 * place) % 20 / 4}" for place in range(40)]
    Path("rows.csv").write_text("\n".join(["text,label,hardness", *rows]))
    files = {"train": "rows.csv", "validation": "texts/validation.jsonl"}
    sizes = {"epochs": 2, "batch_size": 8, "micro_batch_size": 4, "lr": 1e-3, "device": "cpu"}
    given = [{"curriculum": {"column": column}}, {"progress": False}]
    return {
        "model": task["model"],
        "data": task["data"] | {"files": files, "limit": {"train": 30}} | dict(data),
        "train": sizes,
        "plugins": [*task["plugins"], *given, *plugins] if "plugins" in task else [*given, *plugins],
        "output": "run",
    }


def ordered(recipe):
    """The ids of the samples of a run on this process."""
    train(recipe, order := Order())
    return order.ids


@pytest.mark.slow
def test_rows_are_in_the_order_of_their_column(tmp_path, monkeypatch, processes):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    ids = ordered(column_recipe(TEXTS))
    rows = sorted(random.Random(0).sample(range(40), 30))  # by data.limit
    for epoch in (ids[:30], ids[30:]):
        values = [(7 * rows[place]) % 20 / 4 for place in epoch]
        assert sorted(epoch) == list(range(30))
        assert values == sorted(values)
    halves = [each.result for each in processes(2, ordered, column_recipe(TEXTS, "ddp"))]
    for step in range(3):
        both = {place for half in halves for place in half[4 * step : 4 * step + 4]}
        assert both == {*ids[8 * step : 8 * step + 8]}


REFUSED = {
    "missing": (TEXTS, "hardnes", {}, "no column 'hardnes', which plugins.curriculum.column names. Did you mean 'hard"),
    "text": (
        TEXTS,
        "text",
        {},
        r"rows.csv, row 1: column 'text' \(plugins.curriculum.column\) holds 'word0 fine word0'",
    ),
    "streaming": (
        TEXTS,
        "hardness",
        {"streaming": True, "limit": None},
        "plugins.curriculum.column: data.streaming reads rows in",
    ),
    "blocks": (LANGUAGE, "hardness", {}, "are not the 30 rows that have a 'hardness'"),
    "vectors": (VECTORS, "hardness", None, "the task 'module' reads no rows of texts"),
}


def test_columns_that_cannot_order_samples_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    for task, column, data, message in REFUSED.values():
        recipe = column_recipe(task, column=column, data=data or {})
        with pytest.raises(FastloopError, match=message):
            train(recipe | ({"data": task["data"]} if data is None else {}))
