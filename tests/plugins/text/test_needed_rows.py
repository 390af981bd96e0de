"""A run of few steps tokenizes only the rows that it reads, and computes the numbers of a run that tokenizes all.

Modules:
    plugins/fastloop_plugins/text/needed_rows.py
    plugins/fastloop_plugins/text/split_encoder.py
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_helpers import TINY, TINY_GPT, make_run
from training_runs import execute

from fastloop import Plugin, hookimpl, lifecycle
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.text import needed_rows, split_encoder
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.needed_rows import NeededSamples

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
ROWS, HELD_OUT, BATCH = 200, 20, 8
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "labels": ("text-classification", TINY, {"label": "label"}),
    "pairs of texts": ("text-classification", TINY, {"label": "label", "text": ["text", "other"]}),
    "labels, read in blocks": ("text-classification", TINY, {"label": "label", "shuffle_block": 16}),
    "seq2seq": ("seq2seq", T5, {"target": "other", "max_target_length": 8}),
    "texts": ("causal-lm", TINY_GPT, {}),
    "chats": (
        "causal-lm",
        TINY_GPT | {"n_positions": 128},
        {"messages": "messages", "chat_template": "chatml", "max_length": 96},
    ),
}
TASKS["tags"] = ("token-classification", TINY, {"words": "words"})
ROWS_ARE_SAMPLES = ("labels", "labels, read in blocks", "pairs of texts", "seq2seq")
OTHERS = ("texts", "chats", "tags")


class Losses(Plugin):
    """The loss of each step, exactly."""

    name = "losses"

    def __init__(self) -> None:
        super().__init__()
        self.values: list[str] = []

    @hookimpl
    def after_step(self, loss: Any) -> None:
        self.values.append(float(loss).hex())


class OnlyChecks(Plugin):
    """The settings of ``--fast-dev-run``."""

    name = "only-checks"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"max_evaluation_batches": 1, "only_checks": True}


@pytest.fixture(autouse=True)
def _rows() -> None:
    with Path("train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            words = [f"w{number * k % 13}" for k in range(1 + number % 9)] + [f"n{number}"]
            row = {"text": " ".join(words), "other": f"w{number} w3", "label": "ab"[number % 2]}
            row["messages"] = [{"role": "user", "content": f"w{number}"}, {"role": "assistant", "content": "w1 w2"}]
            row |= {"words": words, "tags": ["OB"[index % 2] for index in range(len(words))]}
            file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a saved tokenizer: one that is trained depends on the rows of train."""
    from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"w{number} n{number} user assistant" for number in range(60)]
    trained = train_tokenizer(TrainedTokenizer(kind="bpe", vocab_size=300), texts, True)
    trained.eos_token = "[SEP]"
    trained.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the number of rows from which on they are left out."""

    def set_limit(rows: int) -> None:
        monkeypatch.setattr(needed_rows, "LEFT_OUT", rows)
        monkeypatch.setattr(split_encoder, "LEFT_OUT", rows)

    return set_limit


@pytest.fixture
def run_of(tokenizer: str) -> Callable[..., Run]:
    """Builds a run of a kind of data."""

    def build(kind: str, *plugins: Plugin, **train: Any) -> Run:
        name, config, options = TASKS[kind]
        data = {"files": {"train": "train.jsonl"}, "max_length": 8, "validation_fraction": HELD_OUT / ROWS} | options
        return make_run(name, {"config": config, "tokenizer": tokenizer}, data, plugins, batch_size=BATCH, **train)

    return build


@pytest.fixture
def train(run_of: Callable[..., Run]) -> Callable[..., tuple[Run, list[str]]]:
    """Trains a run. Returns it, and the loss of each step."""

    def train_run(kind: str, *plugins: Plugin, **options: Any) -> tuple[Run, list[str]]:
        losses = Losses()
        run = run_of(kind, losses, *plugins, **options)
        execute(run)
        return run, losses.values

    return train_run


def tokenized(run: Run) -> set[int]:
    """The rows of train that were tokenized before training."""
    samples = run.datasets["train"]
    assert isinstance(samples, NeededSamples)
    return set(samples._needed.ids.tolist())


@pytest.mark.parametrize("cache", [False, True], ids=["in memory", "cached"])
@pytest.mark.parametrize("kind", ROWS_ARE_SAMPLES)
def test_a_run_of_few_steps_has_the_numbers_of_one_that_tokenizes_all_rows(kind, cache, train, left_out, encoded_rows):
    def plugins(folder: str) -> list[Plugin]:
        return [TokenCache(folder=folder)] if cache else []

    whole, expected = train(kind, *plugins("all"), max_steps=3)
    assert sum(encoded_rows) == ROWS
    encoded_rows.clear()
    left_out(100)
    run, losses = train(kind, *plugins("few"), max_steps=3)
    assert losses == expected
    rows = tokenized(run)
    assert 3 * BATCH <= len(rows) < ROWS / 2, "those of the steps, and of the fingerprint of the data"
    assert sum(encoded_rows) == len(rows) + HELD_OUT
    assert run.state.metrics == whole.state.metrics
    assert run.loaders.fingerprints == whole.loaders.fingerprints


@pytest.mark.parametrize("cache", [False, True], ids=["in memory", "cached"])
def test_every_sample_can_be_read_and_equals_that_of_all_rows(cache, run_of, left_out):
    plugins = [TokenCache(folder="cache")] if cache else []
    left_out(100)
    few = run_of("labels", *plugins, max_steps=2).datasets["train"]
    left_out(10**9)
    expected = run_of("labels").datasets["train"]
    assert isinstance(few, NeededSamples)
    order = list(range(len(expected)))
    for samples in (few.__getitems__(order[::-1])[::-1], [few[index] for index in order]):
        assert [np.asarray(sample["input_ids"]).tolist() for sample in samples] == [
            sample["input_ids"].tolist() for sample in map(expected.__getitem__, order)
        ]
        assert [sample["label"] for sample in samples] == expected.labels.tolist()
    copy = pickle.loads(pickle.dumps(few))
    assert copy[7]["input_ids"].tolist() == expected[7]["input_ids"].tolist()
    assert few.lengths.tolist() == expected.lengths.tolist()


def test_a_checkpoint_of_a_short_run_resumes_in_a_longer_one(run_of, train, left_out):
    left_out(10**9)
    _, expected = train("labels", max_steps=12, save_every=None)
    shutil.rmtree("run")
    left_out(50)
    _, losses = train("labels", max_steps=2, save_every=2)
    tree = run_of("labels", max_steps=12).recipe.to_dict()
    rest = Losses()
    with lifecycle.open_run(resolve(make_recipe(tree, Path("recipe.yaml"))), [rest], resume=Path("run")) as run:
        assert isinstance(run.datasets["train"], NeededSamples)
        lifecycle.execute(run)
    assert losses + rest.values == expected


@pytest.mark.parametrize(
    ("plugins", "schedule"),
    [([], {"epochs": 1}), ([LengthBucketing()], {"max_steps": 2}), ([], {"max_steps": 30, "epochs": 2})],
    ids=["all steps", "an order by lengths", "more than an epoch"],
)
def test_a_run_that_may_read_every_row_tokenizes_all(plugins, schedule, run_of, left_out, encoded_rows):
    left_out(1)
    run = run_of("labels", *plugins, **schedule)
    assert not isinstance(run.datasets["train"], NeededSamples)
    assert sum(encoded_rows) == ROWS


def test_few_rows_that_are_left_out_are_tokenized(run_of, encoded_rows):
    run_of("labels", max_steps=2)
    assert sum(encoded_rows) == ROWS


def test_a_later_run_copies_the_rows_of_a_short_one(run_of, left_out, encoded_rows):
    left_out(100)
    rows = tokenized(run_of("labels", TokenCache(folder="cache"), max_steps=2))
    encoded_rows.clear()
    run_of("labels", TokenCache(folder="cache"), epochs=1)
    assert sum(encoded_rows) == ROWS - HELD_OUT - len(rows)


def test_a_second_short_run_reads_no_text_unless_it_needs_other_rows(train, left_out, encoded_rows, monkeypatch):
    left_out(100)
    first, losses = train("labels", TokenCache(folder="cache"), max_steps=2)
    encoded_rows.clear()
    with monkeypatch.context() as patch:
        patch.setattr(TextData, "load", lambda *_: pytest.fail("read again"))
        second, again = train("labels", TokenCache(folder="cache"), max_steps=2)
    assert again == losses
    assert encoded_rows == []
    assert tokenized(second) == tokenized(first)
    assert second.loaders.fingerprints == first.loaders.fingerprints
    names = second.plugins.plugins[0].data.classes
    other = next(row for row in range(ROWS - HELD_OUT) if row not in tokenized(first))
    expected = first.datasets["train"][other]
    for samples in (second.datasets["train"], second.datasets["train"].complete()):
        assert samples[other]["input_ids"].tolist() == expected["input_ids"].tolist()
        assert samples[other]["label"] == expected["label"]
    assert second.plugins.plugins[0].data.classes == names


@pytest.mark.parametrize("harm", ["rows gone", "rows cut", "other rows"])
def test_a_damaged_entry_of_a_short_run_is_made_again(harm, train, left_out):
    left_out(100)
    _, losses = train("labels", TokenCache(folder="cache"), max_steps=2)
    (path,) = Path("cache").glob("*/train-rows.npy")
    if harm == "rows gone":
        path.unlink()
    elif harm == "rows cut":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        np.save(path, np.arange(3))
    assert train("labels", TokenCache(folder="cache"), max_steps=2)[1] == losses


@pytest.mark.parametrize("kind", ["labels", "seq2seq", *OTHERS])
def test_a_check_of_a_recipe_tokenizes_rows_for_its_batches_only(kind, run_of, left_out, encoded_rows, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    left_out(10)
    run = run_of(kind, OnlyChecks(), max_steps=1, micro_batch_size=4)
    assert sum(encoded_rows) < ROWS / 2
    assert len(run.datasets["train"]) >= BATCH
    assert sum("tokenized" in line for line in caplog.messages) == 2, "one line for each split"
    execute(run)
    assert run.state.step == 1


@pytest.mark.parametrize("kind", OTHERS)
def test_a_short_run_whose_samples_depend_on_all_tokens_tokenizes_all_and_proposes_a_limit(
    kind, run_of, left_out, encoded_rows, caplog
):
    caplog.set_level(logging.INFO, "fastloop")
    left_out(10)
    run_of(kind, max_steps=1)
    assert sum(encoded_rows) == ROWS
    (line,) = [line for line in caplog.messages if "data.limit.train" in line]
    assert f"all {ROWS - HELD_OUT} rows" in line
    assert f"reads {BATCH} samples" in line


@pytest.mark.parametrize("kind", OTHERS)
def test_the_proposed_limit_tokenizes_its_rows_only(kind, tokenizer, left_out, encoded_rows, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    left_out(10)
    name, config, options = TASKS[kind]
    data = {"files": {"train": "train.jsonl"}, "max_length": 8, "limit": {"train": 15}, "validation_fraction": 0}
    model = {"config": config, "tokenizer": tokenizer}
    make_run(name, model, data | options, (), batch_size=BATCH, max_steps=1)
    assert sum(encoded_rows) == 15
    assert not any("data.limit.train" in line for line in caplog.messages)


@pytest.mark.parametrize("schedule", [{"epochs": 1}, {"max_steps": 2, "epochs": 1}])
def test_no_limit_is_proposed_where_few_rows_are_not_read(schedule, run_of, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    run_of("chats", **schedule)
    assert not any("data.limit.train" in line for line in caplog.messages)
