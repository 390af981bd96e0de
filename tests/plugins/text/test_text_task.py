"""Tests of ``TextTask``: the example package and a task with rows of its own use all that it offers.

Modules:
    plugins/fastloop_plugins/text/column_data.py
    plugins/fastloop_plugins/text/second_model.py
    plugins/fastloop_plugins/text/task.py
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from training_runs import execute
from transformers import AutoConfig, AutoModelForCausalLM

from fastloop import Batch, RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.testing import expect_problem, find_problems
from fastloop_plugins.data._packing import PackedCollator
from fastloop_plugins.text import Ragged, SecondModel, compute, compute_all, pool, split
from fastloop_plugins.text.chat.rows import Chat
from fastloop_plugins.text.chat.template import BUILT_IN
from fastloop_plugins.text.chunks import text_chunks
from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

ROOT = Path(__file__).parents[3]
SIMILARITY = f"{ROOT}/examples/sentence-similarity/src/sentence_similarity/__init__.py:SentenceSimilarity"
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WORDS = [
    "red",
    "blue",
    "green",
    "old",
    "new",
    "big",
    "small",
    "fast",
    "slow",
    "dog",
    "cat",
    "bird",
    "fish",
    "house",
    "tree",
    "river",
]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """Run each test in a folder with a file of pairs."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    with Path("pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "other", "score"])
        for _ in range(48):
            words = draw.sample(WORDS, draw.randint(2, 9))
            writer.writerow([" ".join(words), " ".join(["the", *reversed(words)]), round(draw.random(), 2)])


def recipe(*plugins: Any, task: str = SIMILARITY, output: str = "run", data: Any = None, **train: Any) -> Recipe:
    """A recipe of a task on pairs."""
    files = {"train": "pairs.csv", "validation": "pairs.csv"}
    return make_recipe(
        {
            "model": {"config": BERT, "tokenizer": {"kind": "word"}},
            "data": {"files": files, "max_length": 24, **(data or {})},
            "train": {"epochs": 2, "batch_size": 8, "lr": 1e-3, "device": "cpu", "save_every": None} | train,
            "plugins": [task, *plugins, {"progress": False}],
            "output": output,
        },
        Path("recipe.yaml"),
    )


def train(*plugins: Any, **options: Any) -> tuple[dict[str, Any], Any]:
    """The summary and the weights of a run."""
    run = build(resolve(recipe(*plugins, **options)))
    summary = execute(run)
    return summary, {name: value.clone() for name, value in run.unwrap_model().state_dict().items()}


def as_batches(rows: list[list[int]], left: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same sequences as a padded batch and as a packed one."""
    ragged = Ragged(
        columns={"input_ids": ([np.array(row, np.int32) for row in rows], 0)},
        loss_weight=len(rows),
        tokens=sum(map(len, rows)),
        reads_all=True,
    )
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}, PackedCollator(lambda samples: Batch(samples), 8).pack(ragged)


@pytest.mark.parametrize("left", [False, True])
def test_pool_and_split_read_padded_and_packed_batches_alike(left):
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    padded, packed = as_batches(rows, left)
    table = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    expected = [table[torch.tensor(row)] for row in rows]
    for batch in (padded, packed):
        states = table[batch["input_ids"]]
        for found, states_of_text in zip(split(states, batch), expected, strict=True):
            assert torch.equal(found, states_of_text)
        assert torch.allclose(pool(states, batch, "mean"), torch.stack([text.mean(0) for text in expected]))
        assert torch.equal(pool(states, batch, "first"), torch.stack([text[0] for text in expected]))
        assert torch.equal(pool(states, batch, "last"), torch.stack([text[-1] for text in expected]))


def test_values_of_all_samples_and_another_model():
    """``compute_all`` gives each sample the values that it has alone, without dropout, as another model loads them."""
    options = recipe(epochs=1)
    options.model["config"] = BERT | {"hidden_dropout_prob": 0.5}
    run = build(resolve(options))
    execute(run)
    dataset, collate, model = run.datasets["validation"], run.loaders.collators["validation"], run.model.train()

    def vectors(model, inputs):
        return torch.stack(pool(compute(model, inputs).last_hidden_state, inputs).chunk(2), 1)

    found = compute_all(run, model, dataset, collate, vectors)
    assert (model.training, found.shape, found.requires_grad) == (True, (48, 2, 16), False)
    other = SecondModel(run.recipe, {"name": "run/model"}, "AutoModel", "plugins.similarity.model")
    other.load_tokenizer(24)
    saved, missing = other.build()
    assert not missing
    with torch.no_grad():
        alone = [vectors(saved.eval(), collate([dataset[index]]).inputs)[0] for index in range(len(dataset))]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-5)
    with expect_problem("file-missing recipe.yaml plugins.similarity.model.name", RecipeError):
        SecondModel(run.recipe, {"name": "./nowhere"}, "AutoModel", "plugins.similarity.model")


def test_packed_pairs_train_to_the_same_numbers(caplog):
    (plain, weights), (packed, others) = train(), train("packing", output="packed")
    assert packed["validation"]["loss"] == pytest.approx(plain["validation"]["loss"], rel=1e-4)
    for name, value in weights.items():
        assert torch.allclose(value, others[name], atol=1e-4), name
    assert plain["validation"]["accuracy"] > 0.2, "of 8 texts, a guess finds one"


def test_auto_selects_the_plugins_that_our_tasks_get():
    run = build(resolve(recipe("auto")))
    assert {"packing", "fast-dropout"} <= {plugin.name for plugin in run.plugins}
    assert "cls-last-layer" not in {plugin.name for plugin in run.plugins}, "the task reads all tokens"
    batch = next(iter(run.train_loader.steps()))[0].inputs
    assert batch["input_ids"].shape[0] == 1
    assert len(batch["sequence_lengths"]) == 16


def test_a_stream_has_the_samples_of_the_rows_in_memory():
    memory = build(resolve(recipe())).datasets["train"]
    stream = build(resolve(recipe(data={"streaming": True, "shuffle_buffer": 0, "lanes": 1}))).datasets["train"]
    assert len(stream) == len(memory) == 48
    for row in (0, 7, 47):
        for name in ("text", "other"):
            assert stream[row][name].tolist() == memory[row][name].tolist()


def test_cached_token_ids_are_not_computed_again(monkeypatch, caplog):
    cache = {"token-cache": {"folder": "cache"}}
    first = build(resolve(recipe(cache)))
    task = first.plugins.task

    def fail(*_: Any) -> Any:
        raise AssertionError("tokenized again")
        yield

    second = resolve(recipe(cache))
    monkeypatch.setattr(type(task), "encode", staticmethod(fail))
    for plugin in second.plugins:
        if plugin.slot == "task":
            monkeypatch.setattr(type(plugin), "encode", staticmethod(fail))
    datasets = build(second).datasets
    assert datasets["train"].ids.tolist() == first.datasets["train"].ids.tolist()
    assert not find_problems(caplog, "no-effect")


def test_the_exported_model_gives_the_predicted_vectors(cli):
    from transformers import AutoModel, AutoTokenizer

    train()
    code, output, _ = cli("predict", "run", "pairs.csv", "--out", "vectors.jsonl")
    assert code == 0, output
    vectors = [json.loads(line)["vector"] for line in Path("vectors.jsonl").read_text().splitlines()]
    assert len(vectors) == 48
    tokenizer, model = AutoTokenizer.from_pretrained("run/model"), AutoModel.from_pretrained("run/model").eval()
    with Path("pairs.csv").open() as file:
        text = next(csv.DictReader(file))["text"]
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    assert normalize(states.mean(1))[0].tolist() == pytest.approx(vectors[0], abs=1e-5)


def test_numbers_are_labels(caplog):
    for streaming in ({}, {"streaming": True, "lanes": 1}):
        summary, _ = train(data={"label": "score", "label_type": "number", **streaming}, output=f"run{len(streaming)}")
        assert {"loss", "pearson"} <= summary["validation"].keys()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"other": "text"}, "repeated-column data.other 'text' data.text"),
        ({"text": ["text", "other"]}, "wrong-type data.text 'text' 'other'"),
        ({"othr": "other"}, "unknown-option data.othr 'other'"),
        (
            {"other": "othr"},
            "unknown-column pairs.csv 'othr' data.other 'other'",
        ),
        ({"files": {"train": "a.txt"}}, "unknown-format a.txt 'sentence-similarity'"),
    ],
    ids=["same column", "list", "option", "column", "txt"],
)
def test_errors_name_the_key(data, expected):
    Path("a.txt").write_text("a text\n")
    with expect_problem(expected, RecipeError):
        build(resolve(recipe(data=data)))


def test_an_architecture_without_the_head_is_refused():
    wrong = SPANS.replace("AutoModelForQuestionAnswering", "AutoModelForSeq2SeqLM")
    Path("spans.py").write_text(wrong)
    with expect_problem("unsupported-model model.config: 'bert' (AutoModelForSeq2SeqLM)", RecipeError):
        build(resolve(recipe(task="spans.py:Spans")))


SPANS = '''
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fastloop import Output, hookimpl, option
from fastloop_plugins.text import DataOptions, ModelOptions, Ragged, Sequences, TextTask, compute, split


@dataclass(kw_only=True)
class SpanData(DataOptions):
    other: str = option("The column of the text to find in data.text.", default="other")


class Marked(Sequences):
    def __getitem__(self, index):
        numbers = super().__getitem__(index)["input_ids"]
        return {"input_ids": numbers[1:], "place": int(numbers[0])}


class Spans(TextTask):
    """Finds the first word of another text in a text."""

    name = "spans"
    columns = inputs = ("text", "other")
    sections = {"model": ModelOptions, "data": SpanData}
    auto_class = "AutoModelForQuestionAnswering"

    @staticmethod
    def encode(tokenizer, rows, arguments):
        for text, other in rows:
            found = tokenizer(text, truncation=True, max_length=arguments["max_length"])["input_ids"]
            word = tokenizer(other.split()[-1], add_special_tokens=False)["input_ids"][0]
            yield [found.index(word) if word in found else 0, *found]

    @staticmethod
    def build_dataset(split, arguments):
        return Marked(split.ids, split.lengths)

    def build_batch(self, samples):
        rows = [sample["input_ids"] for sample in samples]
        labels = torch.tensor([sample["place"] for sample in samples])
        return Ragged(
            columns={"input_ids": (rows, self.text_model.tokenizer.pad_token_id)}, fixed={"labels": labels},
            loss_weight=len(rows), tokens=sum(map(len, rows)),
        )

    @hookimpl
    def compute_loss(self, model, batch):
        logits = split(compute(model, batch).start_logits, batch)
        losses = [cross_entropy(one.float(), place) for one, place in zip(logits, batch["labels"])]
        return Output(torch.stack(losses).mean())

    @hookimpl
    def predict(self, run, batch):
        found = split(compute(run.model, batch).start_logits, batch)
        return {"place": [int(one.argmax()) for one in found]}
'''


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [[], ["packing", {"token-cache": {"folder": "cache"}}]], ids=["plain", "packed"])
def test_a_task_may_have_rows_and_a_head_of_its_own(plugins, cli):
    Path("spans.py").write_text(SPANS)
    summary, _ = train(*plugins, task="spans.py:Spans", output="spans", epochs=20, lr=3e-3)
    assert summary["validation"]["loss"] < 1.0, "a guess among seven tokens has 1.9"
    code, output, _ = cli("predict", "spans", "pairs.csv", "--out", "places.jsonl")
    assert code == 0, output
    assert {json.loads(line)["place"] for line in Path("places.jsonl").read_text().splitlines()} == {1}


PREFERENCES = '''
from dataclasses import dataclass

import torch
from fastloop import Output, hookimpl, option
from fastloop_plugins.text import Chat, ChatRenderer, DataOptions, ModelOptions, TextTask, compute, join_ids, split


@dataclass(kw_only=True)
class PreferenceData(DataOptions):
    text: str = option("The preferred conversation.", default="chosen")
    other: str = option("The other one.", default="rejected")


class Preferences(TextTask):
    """Learns to give preferred answers a larger probability."""

    name = "preferences"
    columns = conversations = ("text", "other")
    sections = {"model": ModelOptions, "data": PreferenceData}
    auto_class = "AutoModelForCausalLM"

    @staticmethod
    def encode(tokenizer, rows, arguments):
        renderer = ChatRenderer(tokenizer)
        for row in rows:
            found = [renderer.encode(Chat.loads(chat)) for chat in row]
            yield join_ids((ids[: arguments["max_length"]], False) for ids, mask in found)

    @hookimpl
    def compute_loss(self, model, batch):
        ids = split(batch["input_ids"], batch)
        logits = split(compute(model, batch).logits.float(), batch)
        scores = torch.stack([
            one[:-1].log_softmax(-1).gather(1, row[1:, None]).mean() for one, row in zip(logits, ids)
        ])
        chosen, rejected = scores.chunk(2)
        return Output(-torch.nn.functional.logsigmoid(chosen - rejected).mean())
'''


def save_chat_model(positions: int = 64) -> None:
    """Save a language model with a chat template in ``gpt``, and the task in ``preferences.py``."""
    tokenizer = train_tokenizer(TrainedTokenizer(kind="byte"), [], False)
    tokenizer.chat_template = BUILT_IN["chatml"]
    tokenizer.save_pretrained("gpt")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": positions, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained("gpt")
    Path("preferences.py").write_text(PREFERENCES)


def test_columns_may_hold_conversations(caplog):
    save_chat_model()
    rows = []
    for number in range(16):
        chats = [
            [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": answer}]
            for answer in ("yes indeed", "no way")
        ]
        rows.append({"chosen": chats[0], "rejected": chats[1]})
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": {"train": "chats.jsonl", "validation": "chats.jsonl"}, "max_length": 64}
    losses = []
    for number, more in enumerate(({}, {"streaming": True, "lanes": 1})):
        changed = recipe(task="preferences.py:Preferences", data={**data, **more}, output=f"chats{number}", lr=3e-3)
        changed.model.clear()
        changed.model["name"] = "gpt"
        losses.append(execute(build(resolve(changed)))["validation"]["loss"])
    assert max(losses) < 0.69, "log 2 is the loss of a guess"
    rows[3]["rejected"] = [{"role": "user"}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with expect_problem("invalid-row chats.jsonl 4 'rejected' data.other", RecipeError):
        build(resolve(changed))
    rows[3]["rejected"] = [{"role": "user", "content": "refused"}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = (
        "{% for m in messages %}{% if m.content == 'refused' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    Path("gpt/chat_template.jinja").write_text(template + BUILT_IN["chatml"])
    changed.data = data
    with expect_problem("invalid-row chats.jsonl, line 4:", RecipeError):
        build(resolve(changed))


def test_conversations_of_a_row_have_its_tools():
    save_chat_model(positions=600)
    pair = {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
    }
    tools = [{"name": "search"}]
    rows = [pair, {**pair, "tools": tools}, {**pair, "tools": json.dumps(tools)}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": {"train": "chats.jsonl"}, "max_length": 600, "validation_fraction": 0}
    for more in ({}, {"streaming": True, "lanes": 1, "shuffle_buffer": 0}):
        changed = recipe(task="preferences.py:Preferences", data=data | more, batch_size=3)
        changed.model.clear()
        changed.model["name"] = "gpt"
        run = build(resolve(changed))
        decode = run.plugins.task.text_model.tokenizer.decode
        for name in ("text", "other"):
            texts = [decode(run.datasets["train"][index][name]) for index in range(3)]
            assert ['{"name": "search"}' in text for text in texts] == [False, True, True]
            assert texts[1] == texts[2]
    ((to_predict, _),) = text_chunks(run.plugins.task.data, Path("chats.jsonl"), 0, 3)
    assert [Chat.loads(text).tools for text in to_predict] == [None, tools, tools]
    rows[1]["tools"] = "search"
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with expect_problem("invalid-row chats.jsonl 2 'tools' 'search'", RecipeError):
        build(resolve(changed))


def test_compute_passes_neither_labels_nor_lengths_to_the_model():
    class ModelOptions(torch.nn.Module):
        def forward(self, **inputs: Any) -> dict[str, Any]:
            return inputs

    batch = {"input_ids": 1, "labels": 2, "sequence_lengths": 3, "position_ids": 4}
    assert compute(ModelOptions(), batch, use_cache=False) == {"input_ids": 1, "position_ids": 4, "use_cache": False}


GRADES = '''
from torch.nn.functional import cross_entropy
from fastloop import Output, hookimpl
from fastloop_plugins.text import DataOptions, ModelOptions, TextTask, compute


class Grades(TextTask):
    """Gives each text a class."""

    name = "grades"
    labels = "required"
    sections = {"model": ModelOptions, "data": DataOptions}
    auto_class = "AutoModelForSequenceClassification"
    reads_all = False
    template = "grade this: {}"  # of this task: no template of chats

    def check_model(self, run, model, make):
        assert make()["input_ids"].shape[0] == 2

    @hookimpl
    def compute_loss(self, model, batch):
        logits = compute(model, batch).logits
        return Output(cross_entropy(logits, batch["labels"]), logits, batch["labels"])
'''


def test_a_head_for_classes_keeps_the_ids_of_a_checkpoint():
    Path("grades.py").write_text(GRADES)
    with Path("grades.csv").open("w") as file:
        file.write(
            "text,grade\n" + "".join(f"{WORDS[0]} {word},{'ab'[index % 2]}\n" for index, word in enumerate(WORDS))
        )
    data = {"files": {"train": "grades.csv", "validation": "grades.csv"}, "label": "grade"}
    first = build(resolve(recipe(task="grades.py:Grades", data=data, output="first")))
    assert first.datasets["train"].labels.tolist()[:3] == [0, 1, 0]
    model = first.unwrap_model()
    model.config.id2label, model.config.label2id = {0: "b", 1: "a"}, {"b": 0, "a": 1}
    model.save_pretrained("checkpoint")
    task = first.plugins.task
    assert task.text_model.tokenizer.chat_template is None
    task.text_model.tokenizer.save_pretrained("checkpoint")
    changed = recipe("packing", task="grades.py:Grades", data=data, output="second")
    changed.model.clear()
    changed.model["name"] = "checkpoint"
    second = build(resolve(changed))
    assert second.datasets["train"].labels.tolist()[:3] == [1, 0, 1]
    assert torch.equal(second.unwrap_model().classifier.weight, model.classifier.weight)
    assert "sequence_lengths" not in next(iter(second.train_loader.steps()))[0].inputs


VALUES_TASK = """
import json
from collections.abc import Iterator
from dataclasses import dataclass

from fastloop import Output, hookimpl, option
from fastloop_plugins.text import DataOptions, ModelOptions, Sequences, TextTask, compute


@dataclass(kw_only=True)
class ValueData(DataOptions):
    extra: str | list[str] | None = option("Columns of values.", default=None)


class Rows(Sequences):
    def __init__(self, split):
        super().__init__(split.ids, split.lengths)
        starts = self.ends - split.lengths
        self.starts, self.lengths = starts + 1, split.ids[starts].astype("int64")

    def __getitem__(self, index):
        start = self.starts[index]
        return {"input_ids": self.ids[start : start + self.lengths[index]]}

    def values(self, index):
        start = self.starts[index] + self.lengths[index]
        return json.loads(bytes(self.ids[start : self.ends[index]].astype("uint8")))


class Valued(TextTask):
    name = "valued"
    columns = ("text", "extra")
    values = ("extra",)
    sections = {"model": ModelOptions, "data": ValueData}

    @staticmethod
    def encode(tokenizer, rows, arguments):
        for row in rows:
            text, *values = (row,) if isinstance(row, str) else row
            ids = tokenizer(text)["input_ids"]
            yield [len(ids), *ids, *("[" + ",".join(values) + "]").encode()]

    @staticmethod
    def build_dataset(split, arguments):
        return Rows(split)

    @hookimpl
    def compute_loss(self, model, batch):
        return Output(compute(model, batch).last_hidden_state.square().mean())
"""


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, [[], []]),
        ("answer", [[3], [None]]),
        (["kind", "answer"], [[{"a": [1, "é"]}, 3], [True, None]]),
    ],
    ids=["none", "one", "two"],
)
def test_values_of_any_json_type_reach_a_task(extra, expected):
    Path("valued.py").write_text(VALUES_TASK)
    rows = [{"text": "red dog", "kind": {"a": [1, "é"]}, "answer": 3}, {"text": "blue cat", "kind": True}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": {"train": "rows.jsonl"}, "validation_fraction": 0, "extra": extra}
    run = build(resolve(recipe(task="valued.py:Valued", data=data)))
    dataset = run.datasets["train"]
    assert [dataset.values(index) for index in range(2)] == expected
    task = next(plugin for plugin in run.plugins if plugin.name == "valued")
    assert task.data.names_of("extra") == ([extra] if isinstance(extra, str) else extra or [])


def test_a_value_that_json_lacks_is_refused():
    Path("valued.py").write_text(VALUES_TASK)
    Path("rows.py").write_text(
        "import datetime\ndef rows():\n    return {'train': [{'text': 'red', 'day': datetime.date(2020, 1, 2)}]}\n"
    )
    data = {"files": None, "module": "rows.py:rows", "validation_fraction": 0, "extra": "day"}
    with expect_problem("invalid-row 1 'day' data.extra datetime.date(2020 2", RecipeError):
        build(resolve(recipe(task="valued.py:Valued", data=data)))
