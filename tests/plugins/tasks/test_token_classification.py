"""Token classification: targets of words, loss, long sentences, and tags and metrics of other libraries.

Modules:
    plugins/fastloop_plugins/tasks/tags/batches.py
    plugins/fastloop_plugins/tasks/token_classification.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from string import ascii_letters
from typing import Any

import entity_reference
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_runs import assert_same
from tag_helpers import SCRATCH, SPLITS, TAGS, TASK, make, tags_by_hand, trained, write_conll, write_jsonl, write_splits
from text_helpers import TINY_GPT
from text_loops import BATCH, BERT, EPOCHS, LR, SEED
from torch.nn.functional import cross_entropy
from transformers import AutoModelForTokenClassification, AutoTokenizer

from fastloop.errors import RecipeError
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.datasets.dispatches import dispatches
from fastloop_plugins.tasks.tags.batches import cut_words, windows
from fastloop_plugins.tasks.tags.words import pairs


def task_of(run: Any) -> Any:
    """The plugin of the task."""
    return next(plugin for plugin in run.plugins.plugins if plugin.name == TASK)


# -- words and tokens --------------------------------------------------------------------------------------------------


def test_targets_by_hand():
    ids, words = [11, 12, 13, 21, 41], [0, 0, 0, 1, 3]  # word 2 and word 4 have no token
    assert pairs(ids, words, [5, 6, 0, 2, 1], 99) == [11, 5, 12, ~5, 13, ~5, 21, 6, 99, 0, 41, 2, 99, 1]


@pytest.mark.parametrize(
    "config",
    [SCRATCH["config"], BERT | {"max_position_embeddings": 64}, TINY_GPT | {"n_positions": 64}],
    ids=["distilbert", "bert", "gpt2"],
)
@pytest.mark.parametrize("label_tokens", ["first", "all"])
def test_batches_equal_the_alignment_by_word_ids(config, label_tokens):
    run = make(write_splits(), SCRATCH | {"config": config}, {"label_tokens": label_tokens})
    tokenizer = task_of(run).text_model.tokenizer
    rows = dispatches(**SPLITS)["train"][:8]
    expected = tokenizer([row["words"] for row in rows], is_split_into_words=True, padding=True, return_tensors="pt")
    targets = torch.full_like(expected["input_ids"], IGNORED)
    for index, row in enumerate(rows):
        before = None
        for place, word in enumerate(expected.word_ids(index)):
            if word is not None and (word != before or label_tokens == "all"):
                targets[index, place] = TAGS.index(row["tags"][word])
            before = word
    batch = run.loaders.collators["train"]([run.datasets["train"][index] for index in range(8)])
    assert torch.equal(batch.inputs["input_ids"], expected["input_ids"])
    assert torch.equal(batch.inputs["attention_mask"], expected["attention_mask"])
    assert torch.equal(batch.inputs["labels"], targets)
    assert batch.loss_weight == (targets != IGNORED).sum()
    assert batch.tokens == expected["attention_mask"].sum()


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40), room=st.integers(1, 12))
def test_rows_of_a_sentence_hold_whole_words(sizes, room):
    found = np.array(
        [(token, 1 if part == 0 else ~1) for word, size in enumerate(sizes) for part in range(size) for token in [word]]
    )
    tokens, (count,), cut = cut_words(found, np.array([2 * len(found)]), room)
    assert cut == sum(size > room for size in sizes)
    assert count == len(tokens) == sum(min(size, room) for size in sizes)
    assert (tokens[:, 1] >= 0).sum() == len(sizes)
    ends = np.cumsum(windows(tokens[:, 1], room))
    assert ends[-1] == count
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        assert 0 < end - start <= room
        assert tokens[start, 1] >= 0, "a row begins with a word"
        assert end == count or end - start + min(sizes[tokens[end, 0]], room) > room, "the next word does not fit"


def test_no_word_of_a_long_sentence_is_left_out(cli, caplog):
    long = {
        key: [value for row in dispatches(**SPLITS)["train"][:12] for value in row[key]] for key in ("words", "tags")
    }
    long["words"][3] = "".join(random.Random(0).choices(ascii_letters, k=200))
    data = write_splits() | {"max_length": 48}
    write_conll("train.conll", [long, *dispatches(**SPLITS)["train"]])
    write_conll("test.conll", [*dispatches(**SPLITS)["test"], long])
    run = trained(data, SCRATCH, optimizer="AdamW", epochs=6)
    batches = list(run.train_loader.batches())
    total = sum(len(row["words"]) for row in [long, *dispatches(**SPLITS)["train"]])
    assert sum(batch.loss_weight for batch in batches) == total
    assert max(batch.inputs["input_ids"].shape[1] for batch in batches) == 48
    assert all(len(batch.inputs["input_ids"]) == batch.samples <= BATCH for batch in batches), (
        "in training, each row is a sample"
    )
    assert_problem(caplog, "sentences-divided data: train: 1 41 data.max_length")
    assert_problem(caplog, "words-cut data: train: 1 data.max_length")
    code, out, err = cli("predict", "run", "test.conll", "--chunk", "8")
    assert code == 0, err
    assert err.count("predict: 1 of 21 sentences does not fit") == 1
    last = json.loads(out.splitlines()[-1])
    assert last["words"] == long["words"]
    assert len(last["tags"]) == len(last["probabilities"]) == len(long["words"])
    predicted = [json.loads(line)["tags"] for line in out.splitlines()]
    actual = [row["tags"] for row in [*dispatches(**SPLITS)["test"], long]]
    assert run.state.metrics["test"]["accuracy"] == pytest.approx(entity_reference.accuracy(actual, predicted))
    expected = entity_reference.total(entity_reference.count(actual, predicted))
    assert run.state.metrics["test"]["f1"] == pytest.approx(expected["f1"])
    assert 0 < run.state.metrics["test"]["f1"] < 1


def test_words_without_tokens_keep_their_tags(cli):
    rows = [{"words": ["Ada", "\u200b", "sings", "\x07"], "tags": ["B-PER", "O", "O", "O"]}] * 8
    write_jsonl("train.jsonl", rows)
    model = SCRATCH | {"tokenizer": {"kind": "word"}}
    run = trained({"files": {"train": "train.jsonl", "validation": "train.jsonl"}, "max_length": 16}, model)
    assert all(batch.loss_weight == 32 for batch in run.train_loader.batches())
    code, out, err = cli("predict", "run", "train.jsonl")
    assert code == 0, err
    assert [len(json.loads(line)["tags"]) for line in out.splitlines()] == [4] * 8


# -- the loss ----------------------------------------------------------------------------------------------------------


def pretrained(data: dict[str, Any]) -> str:
    """A folder with an untrained model and its tokenizer."""
    run = make(data)
    task_of(run).text_model.export(run, Path("pretrained"))
    return "pretrained"


def plain_loop(folder: str, weights: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Train with SGD on the same batches, by transformers and torch."""
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows, optimizer = dispatches(**SPLITS)["train"], torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.0)
    model.train()
    for epoch in range(EPOCHS):
        for ids in torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + epoch)).split(BATCH):
            chosen = [rows[index] for index in ids.tolist()]
            inputs = tokenizer(
                [row["words"] for row in chosen], is_split_into_words=True, padding=True, return_tensors="pt"
            )
            targets = torch.full_like(inputs["input_ids"], IGNORED)
            for index, row in enumerate(chosen):
                words = inputs.word_ids(index)
                for word, tag in enumerate(row["tags"]):
                    targets[index, words.index(word)] = TAGS.index(tag)
            cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), weights).backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def test_training_equals_a_plain_loop():
    data = write_splits()
    folder = pretrained(data)
    assert_same(trained(data, {"name": folder}).unwrap_model().state_dict(), plain_loop(folder))


@pytest.mark.parametrize(
    ("plugins", "train"), [((), {"micro_batch_size": 2}), (("packing",), {})], ids=["micro-batches", "packing"]
)
def test_class_weights_give_the_loss_of_one_big_batch(plugins, train):
    data = write_splits()
    folder = pretrained(data)
    weights = {tag: 1.0 + index for index, tag in enumerate(TAGS)}
    run = trained(
        data, {"name": folder}, {"loss": {"name": "cross_entropy", "class_weights": weights}}, plugins, **train
    )
    theirs = plain_loop(folder, torch.tensor(list(weights.values())))
    for name, tensor in run.unwrap_model().state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


def test_balanced_weights_count_the_words_of_training():
    run = make(write_splits(), task={"loss": {"name": "focal", "class_weights": "balanced"}})
    tags = [tag for row in dispatches(**SPLITS)["train"] for tag in row["tags"]]
    expected = torch.tensor([len(tags) / (len(TAGS) * tags.count(tag)) for tag in TAGS])
    torch.testing.assert_close(task_of(run).criterion.weights, expected)


def test_balanced_needs_words_of_each_tag():
    loss = {"name": "focal", "class_weights": "balanced"}
    with expect_problem("empty-class loss.class_weights: balanced: 'B-RARE'", RecipeError):
        make(write_splits() | {"tag_names": [*TAGS, "B-RARE"]}, task={"loss": loss})


def test_balanced_weights_count_the_words_of_the_folds_that_are_trained_on(caplog):
    loss = {"name": "focal", "class_weights": "balanced"}
    run = make(write_splits(), task={"loss": loss}, plugins=[{"folds": {"number": 1, "of": 3}}])
    trained_on = run.datasets["train"]
    counts = torch.zeros(len(TAGS))
    for index in range(len(trained_on)):
        targets = trained_on[index]["targets"]
        counts += torch.bincount(torch.as_tensor(targets[targets >= 0]), minlength=len(TAGS))
    assert 0 < len(trained_on) < sum(len(rows) for rows in dispatches(**SPLITS).values())
    torch.testing.assert_close(task_of(run).criterion.weights, counts.sum() / (len(TAGS) * counts))
    assert not hasattr(trained_on, "labels"), "each token has a tag, and a sample has no class"
    assert "other-class-weights" not in caplog.text


# -- tags --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_its_order_of_tags_and_its_head():
    data = write_splits()
    first = trained(data)
    folder = Path("run/model")
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {str(index): tag for index, tag in enumerate(TAGS)}
    names = TAGS[::-1]
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    (folder / "config.json").write_text(json.dumps(config))
    run = make(data, {"name": str(folder)}, output="again")
    assert torch.equal(run.model.classifier.weight, first.unwrap_model().classifier.weight)
    words = dispatches(**SPLITS)["train"][0]["tags"]
    assert [names[tag] for tag in run.datasets["train"].tags()[: len(words)]] == words
    other = make(data | {"tag_names": [*TAGS, "B-MISC"]}, {"name": str(folder)}, output="other")
    assert other.model.config.num_labels == 8, "other tags: a new head"


def test_a_text_classifiers_head_is_replaced():
    folder = pretrained(write_splits())
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    before = AutoModelForTokenClassification.from_pretrained(folder).classifier.weight
    assert not torch.equal(make(write_splits(), {"name": folder}).model.classifier.weight, before)


# -- evaluate and predict ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with CoNLL files, and a run that learned something."""
    import os

    here, folder = Path.cwd(), tmp_path_factory.mktemp("tags")
    os.chdir(folder)
    try:
        trained(write_splits(), optimizer="AdamW", epochs=12)
    finally:
        os.chdir(here)
    return folder


def rows_of(cli: Any, *arguments: Any) -> list[dict[str, Any]]:
    code, out, err = cli("predict", *map(str, arguments))
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
def test_predictions_equal_a_forward_pass_and_the_pipeline(folder, cli):
    from transformers import pipeline

    found = rows_of(cli, folder / "run", folder / "test.conll", "--chunk", 7)
    expected = dispatches(**SPLITS)["test"]
    assert [row["words"] for row in found] == [row["words"] for row in expected]
    by_hand = tags_by_hand(folder / "run/model", [row["words"] for row in expected])
    assert [row["tags"] for row in found] == [tags for tags, _ in by_hand]
    for row, (_, probabilities) in zip(found, by_hand, strict=True):
        assert row["probabilities"] == pytest.approx(probabilities, abs=1e-5)
    tagger = pipeline(
        "token-classification",
        model=str(folder / "run/model"),
        device="cpu",
        aggregation_strategy="first",
        ignore_labels=[],
    )
    for row in found[:5]:
        (groups,) = tagger(row["words"], is_split_into_words=True, aggregation_strategy="none")
        places = np.cumsum([0, *(len(word) + 1 for word in row["words"])])[:-1]
        firsts = {item["start"]: item for item in reversed(groups)}
        assert [firsts[place]["entity"] for place in places.tolist()] == row["tags"]


@pytest.mark.slow
@pytest.mark.parametrize("plugins", ["packing", "length-bucketing", "dataloader-workers"])
def test_plugins_keep_predictions(folder, cli, plugins):
    options = ["plugins.dataloader-workers.num_workers=1"] if "workers" in plugins else []
    plain = rows_of(cli, folder / "run", folder / "test.conll")
    for row, expected in zip(
        rows_of(cli, folder / "run", folder / "test.conll", *options, "--with", plugins), plain, strict=True
    ):
        assert row["tags"] == expected["tags"]
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)


@pytest.mark.slow
def test_evaluate_equals_a_count_of_the_predictions(folder, cli):
    predicted = [row["tags"] for row in rows_of(cli, folder / "run", folder / "test.conll")]
    actual = [row["tags"] for row in dispatches(**SPLITS)["test"]]
    code, out, err = cli("evaluate", str(folder / "run"), "--json", "-")
    assert code == 0, err
    result = json.loads(out)
    counts = entity_reference.count(actual, predicted)
    expected = entity_reference.total(counts)
    assert 0 < expected["f1"] < 1
    assert result["metrics"]["accuracy"] == pytest.approx(entity_reference.accuracy(actual, predicted))
    assert {name: result["metrics"][name] for name in expected} == pytest.approx(expected)
    assert [row["name"] for row in result["entities"]] == ["LOC", "ORG", "PER"]
    for row in result["entities"]:
        counted = counts[row["name"]]
        assert {name: row[name] for name in expected} == pytest.approx(entity_reference.scores(*counted))
        assert row["samples"] == counted[2]
    assert [row["name"] for row in result["classes"]] == TAGS
    assert sum(map(sum, result["confusion"])) == sum(map(len, actual))
    trained = json.loads((folder / "run/summary.json").read_text())["test"]
    assert result["metrics"] == pytest.approx(trained, rel=1e-6)


@pytest.mark.slow
def test_inputs_and_formats_of_predictions(folder, cli):
    (row,) = rows_of(cli, folder / "run", "Ada Marlow of Holton left .")
    assert row["words"] == ["Ada", "Marlow", "of", "Holton", "left", "."]
    for entity in row["entities"]:
        assert entity["text"] == " ".join(row["words"][entity["start"] : entity["end"]])
        assert row["tags"][entity["start"]].endswith(entity["type"])
    Path("words.conll").write_text("Ada\nsings\n\n\nBen\n")
    assert [row["words"] for row in rows_of(cli, folder / "run", "words.conll")] == [["Ada", "sings"], ["Ben"]]
    write_jsonl("words.jsonl", [{"words": ["Ada", "sings"]}, {"words": []}, {"words": ["Ben"]}])
    plain = rows_of(cli, folder / "run", "words.jsonl", "--chunk", 1)
    assert [len(row["tags"]) for row in plain] == [2, 0, 1]
    Path("lines.txt").write_text("Ada sings\n\nBen\n")
    assert rows_of(cli, folder / "run", "lines.txt") == plain
    test = rows_of(cli, folder / "run", "--split", "test", "--without", "auto")  # a small file is predicted without it
    assert test == rows_of(cli, folder / "run", folder / "test.conll")
    for out in ("out.csv", "out.parquet"):
        assert cli("predict", str(folder / "run"), "words.jsonl", "--out", out, "--chunk", "1")[0] == 0
    import csv

    from pyarrow import parquet

    with Path("out.csv").open() as file:
        assert [json.loads(row["tags"]) for row in csv.DictReader(file)] == [row["tags"] for row in plain]
    assert parquet.read_table("out.parquet").to_pylist() == plain


def test_evaluation_refuses_tags_that_the_model_lacks(folder, cli):
    Path("other.conll").write_text("Ada B-PER\nlikes O\nVivaldi B-MUS\n")
    code, _, err = cli("evaluate", str(folder / "run"), "--file", "other.conll")
    assert code != 0
    assert_problem(" ".join(err.split()), "unknown-label other.conll line 3 'B-MUS' data.tags")


# -- when it is on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "task"),
    [
        ({"files": {"train": "a.jsonl"}, "tags": "ner"}, TASK),
        ({"files": {"train": ["a.conll.gz"]}}, TASK),
        ({"files": {"train": "a.txt"}, "format": "conll"}, TASK),
        ({"files": {"train": "a.txt"}}, "causal-lm"),
        ({"files": {"train": "a.csv"}, "label": "label"}, "text-classification"),
    ],
)
def test_the_data_section_selects_the_task(data, task):
    recipe = make_recipe(
        {"model": SCRATCH, "data": data, "train": {"device": "cpu"}, "output": "run"}, Path("recipe.yaml")
    )
    assert resolve(recipe).plugins.in_slot("task") == task


def test_models_that_cannot_tag_are_refused():
    with expect_problem("unsupported-model 'opt'", RecipeError):
        make(write_splits(), SCRATCH | {"config": {"model_type": "opt"}})
    with expect_problem("out-of-range data.max_length 2", RecipeError):
        make(write_splits() | {"max_length": 2})


# -- pretrained tokenizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "RobertaTokenizer", "GPT2Tokenizer"])
def test_byte_level_tokenizers_get_a_space_before_each_word(kind, cli):
    """As in a text, where these tokenizers read the space with the word. The exported tokenizer does the same."""
    from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

    rows = dispatches(**SPLITS)
    texts = [" ".join(row["words"]) for row in rows["train"]]
    plain = train_tokenizer(TrainedTokenizer(vocab_size=400), texts, True)
    plain.save_pretrained("tokenizer")
    path = Path("tokenizer/tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))
    run = trained(write_splits(), SCRATCH | {"tokenizer": "tokenizer"}, epochs=1)
    used = task_of(run).text_model.tokenizer
    assert type(used).__name__.startswith(kind.replace("PreTrainedTokenizerFast", ""))
    sentence = rows["train"][0]["words"]
    ids = used(sentence, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert ids == plain(" " + " ".join(sentence), add_special_tokens=False)["input_ids"]
    exported = AutoTokenizer.from_pretrained("run/model")
    assert (
        exported(sentence, is_split_into_words=True)["input_ids"]
        == used(sentence, is_split_into_words=True)["input_ids"]
    )
    found = rows_of(cli, "run", "test.conll")
    assert [row["tags"] for row in found] == [
        tags for tags, _ in tags_by_hand(Path("run/model"), [row["words"] for row in rows["test"]])
    ]
