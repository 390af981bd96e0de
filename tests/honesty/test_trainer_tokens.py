"""Samples of token ids without padding train as with a padding collator, or the error names field and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from fastloop import Trainer
from fastloop.errors import DataError
from fastloop.testing import expect_problem

LENGTHS = [3, 7, 5, 5, 2, 9, 4, 4]
CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}


def make_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, **{"pad_token": "[PAD]", "unk_token": "[UNK]"} | settings)


def token_lists(each_token: bool = False) -> list[dict[str, Any]]:
    rows = [{"input_ids": [2 + (i * j) % 37 for j in range(1, size + 1)]} for i, size in enumerate(LENGTHS, 1)]
    return [
        row | {"labels": [j % 2 for j in row["input_ids"]] if each_token else len(row["input_ids"]) % 2} for row in rows
    ]


def train(cls: Any, data: Any, output: str, **settings: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = cls(DistilBertConfig(**CONFIG))
    quiet = [{"log": False}, {"progress": False}]
    Trainer(
        model, data, plugins=quiet, epochs=2, optimizer="SGD", lr=0.1, device="cpu", output=output, **settings
    ).fit()
    return model.state_dict()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("each_token", [False, True])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_processing_class_pads_as_a_collator_does(side, each_token, as_tensors):
    cls = DistilBertForTokenClassification if each_token else DistilBertForSequenceClassification
    tokenizer, rows = make_tokenizer(padding_side=side), token_lists(each_token)
    collate = (DataCollatorForTokenClassification if each_token else DataCollatorWithPadding)(tokenizer)
    expected = train(cls, DataLoader(rows, batch_size=4, collate_fn=collate), "expected")
    if as_tensors:
        rows = [{name: torch.tensor(value) for name, value in row.items()} for row in rows]
    found = train(cls, DataLoader(rows, batch_size=4), "found", processing_class=tokenizer)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_of_a_causal_language_model_does_not_depend_on_the_batch(side):
    """padding before a row would have to predict its first token, and would move its positions"""
    rows = [{"input_ids": row["input_ids"], "labels": list(row["input_ids"])} for row in token_lists()]
    tokenizer = make_tokenizer(padding_side=side, model_input_names=["input_ids", "attention_mask"])
    losses = []
    for batch_size in (1, 4):
        torch.manual_seed(3)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2))
        trainer = Trainer(
            model, rows, rows, processing_class=tokenizer, batch_size=batch_size, device="cpu", output=str(batch_size)
        )
        losses.append(trainer.validate()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_lists_of_equal_lengths_need_no_tokenizer():
    rows = [{"input_ids": [2, 3, 4 + i], "labels": i % 2} for i in range(8)]
    tensors = [{"input_ids": torch.tensor(row["input_ids"]), "labels": row["labels"]} for row in rows]
    one, other = (
        train(DistilBertForSequenceClassification, DataLoader(data, batch_size=4), "run") for data in (rows, tensors)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_tokenizer_the_error_names_the_field_and_the_remedy(workers):
    with pytest.raises(DataError) as caught:
        train(DistilBertForSequenceClassification, DataLoader(token_lists(), batch_size=4, num_workers=workers), "run")
    facts = ("'input_ids'", "(3,)", "(7,)", "processing_class=tokenizer", "DataLoader(collate_fn=...)")
    assert all(fact in str(caught.value) for fact in facts)


def test_a_tokenizer_without_a_padding_token_is_named():
    with expect_problem("no-padding-token processing_class tokenizer.pad_token", DataError):
        train(
            DistilBertForSequenceClassification,
            token_lists(),
            "run",
            batch_size=4,
            processing_class=make_tokenizer(pad_token=None),
        )


def test_the_module_task_names_its_collator():
    Path("rows.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.table = nn.Embedding(40, 2)\n"
        "    def forward(self, ids):\n        return self.table(ids).mean(1)\n"
        "def data():\n    return {'train': [(torch.arange(2 + i % 3), i % 2) for i in range(8)]}\n"
        "def padded(rows):\n"
        "    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)\n"
        "    return ids, torch.tensor([label for _, label in rows])\n"
    )
    Path("r.yaml").write_text(
        "model: {module: 'rows.py:Net'}\ndata: {module: 'rows.py:data'}\ntrain: {epochs: 1, batch_size: 4, "
        "device: cpu}\n"
        "plugins: [{module: {loss: cross_entropy}}, {progress: false}]\noutput: out\n"
    )
    with expect_problem("wrong-shape 0 (2,) (4,) plugins.module.collate=FILE.py:NAME.", DataError):
        run("r.yaml")
    assert run("r.yaml", "plugins.module.collate=rows.py:padded")["status"] == "completed"


def run(path: str, *overrides: str) -> dict[str, Any]:
    from training_runs import execute

    from fastloop.lifecycle import build
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import load_recipe

    recipe = load_recipe(path, overrides)
    return execute(build(resolve(recipe)))
