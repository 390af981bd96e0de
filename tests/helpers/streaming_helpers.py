"""Shared by the tests of ``data.streaming``: files of rows, recipes that stream them, and the ids of all batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest
from pyarrow import parquet
from text_helpers import TINY, TINY_GPT, make_run, rows

from fastloop import Settings
from fastloop.data import Loader
from fastloop.run import Run
from fastloop_plugins.data._watched_loader import WatchedLoader
from fastloop_plugins.rows.index import Reader

NAMES = ("bad", "good")
KILL = """
import os, signal
from fastloop import Plugin, hookimpl

class Kill(Plugin):
    name = "kill"

    @hookimpl
    def after_backward(self, run):
        if run.state.step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""A plugin that kills its process at the step KILL_AT."""
STREAM: dict[str, Any] = {
    "streaming": True,
    "validation_fraction": 0,
    "max_length": 16,
    "shuffle_buffer": 100,
    "lanes": 4,
}
MODEL: dict[str, Any] = {"config": TINY, "tokenizer": {"kind": "word", "vocab_size": 60}}
LANGUAGE: dict[str, Any] = {"config": TINY_GPT | {"n_positions": 64}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}


def write_parquet(path: str, table: Sequence[Mapping[str, Any]], group: int = 32) -> str:
    """A Parquet file with row groups of ``group`` rows."""
    parquet.write_table(pyarrow.Table.from_pylist(list(table)), path, row_group_size=group)
    return path


def write_arrow(path: str, table: Sequence[Mapping[str, Any]], group: int = 32) -> str:
    """An Arrow file with record batches of ``group`` rows: a stream, as ``datasets`` saves it."""
    found = pyarrow.Table.from_pylist(list(table))
    with pyarrow.ipc.new_stream(path, found.schema) as file:
        file.write_table(found, max_chunksize=group)
    return path


def write_lines(path: str, table: Sequence[Mapping[str, Any]]) -> str:
    """A JSONL file."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def write_shards(count: int = 403) -> list[str]:
    """Two Parquet files and one JSONL file with ``count`` different rows."""
    table = rows(count, NAMES)
    third = count // 3
    return [
        write_parquet("a.parquet", table[:third]),
        write_parquet("b.parquet", table[third : 2 * third], group=50),
        write_lines("c.jsonl", table[2 * third :]),
    ]


def classify(train: Any, objects: Any = (), **changes: Any) -> Run:
    """A run of text-classification that streams ``train``. Upper-case changes are for the ``train`` section or the
    tokenizer, others for ``data``."""
    section = {name.lower(): changes.pop(name) for name in list(changes) if name.isupper()}
    model = MODEL | {"tokenizer": section.pop("tokenizer", MODEL["tokenizer"])}
    return make_run("text-classification", model, data_section(train, {"label": "label"} | changes), objects, **section)


def data_section(train: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The ``data`` section. With ``streaming=None``, the rows are in memory."""
    keys = STREAM if "streaming" not in changes else {"validation_fraction": 0, "max_length": 16}
    return {
        name: value
        for name, value in ({**keys, "files": {"train": train}} | dict(changes)).items()
        if value is not None
    }


def generate(train: Any, **changes: Any) -> Run:
    """A run of causal-lm that streams ``train``."""
    return make_run("causal-lm", LANGUAGE, data_section(train, changes))


def loader(run: Run, rank: int = 0, world_size: int = 1, workers: int = 0, batch_size: int = 16) -> Loader:
    """The training loader that one of several processes has."""
    size = batch_size // world_size
    settings = {"rank": rank, "world_size": world_size, "seed": 1, "shuffle": True}
    return Loader(
        run.datasets["train"],
        run.loaders.collators["train"],
        Settings(num_workers=workers, loader_class=WatchedLoader),
        batch_size=batch_size,
        micro_batch_size=size,
        **settings,
    )


def ids_by_step(run: Run, world_size: int = 1, workers: int = 0, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """The sample ids of each step of an epoch: of all processes, in the order of ranks."""
    ranks = []
    for rank in range(world_size):
        made = loader(run, rank, world_size, workers)
        ranks.append([[number for batch in step for number in batch.ids] for step in made.steps(epoch, start)])
        made.close()
    return [[number for part in parts for number in part] for parts in zip(*ranks, strict=True)]


def every_column(count: int) -> list[dict[str, Any]]:
    """Rows with a column for each option of the text tasks. Row 30 has an empty text, and no two rows are equal."""
    found = []
    for number, row in enumerate(rows(count, NAMES)):
        words = row["text"].split()
        question = [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": row["text"]}]
        found.append(
            row | {"other": f"number {number % 7}", "words": words}
            | {"tags": ["NUMBER" if word == "number" else "O" for word in words]}
            | {"messages": question, "prompt": f"number {number}", "short": " ".join(words[-3:])}
        )  # fmt: skip
    if count > 30:
        found[30] |= {"text": "", "label": "good"}
    return found


def samples_of(dataset: Any) -> list[dict[str, Any]]:
    """The samples of a dataset in its order, as plain lists and numbers. Without ``row``, which is a place and no
    content."""
    found = dataset if hasattr(dataset, "read_ranges") else (dataset[number] for number in range(len(dataset)))
    return [
        {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items() if name != "row"}
        for sample in found
    ]


def record_readers(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Reader]:
    """All readers of files that a module makes from here on."""
    made: list[Reader] = []

    class Recorded(Reader):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(module, "Reader", Recorded)
    return made
