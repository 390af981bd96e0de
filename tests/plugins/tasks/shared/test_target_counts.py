"""Losses that are a mean over targets which are not ignored: micro-batches and processes give one batch's gradients.

Modules:
    plugins/fastloop_plugins/_targets.py
    plugins/fastloop_plugins/tasks/shared/collate.py
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fastloop import Batch, Trainer
from fastloop.testing import ProcessResult

WORDS = 12
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": WORDS}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Any] = {
    "causal": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=WORDS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ),
    "masked": lambda: BertForMaskedLM(BertConfig(**TINY, **OFF)),
    "tags": lambda: BertForTokenClassification(BertConfig(**TINY, **OFF, num_labels=3)),
    "seq2seq": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
}


def samples(classes: int) -> list[dict[str, torch.Tensor]]:
    """Eight rows of six labels. At least two of each are targets, because a causal model does not predict the first;
    one row has none."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(8):
        labels = torch.randint(1, classes, (6,), generator=generator)
        labels[2 + (number * 3) % 5 :] = -100
        if number == 3:
            labels[:] = -100
        rows.append({"input_ids": torch.randint(0, WORDS, (6,), generator=generator), "labels": labels})
    return rows


class Scores(nn.Module):
    """Scores (batch, classes, 6) of inputs (batch, 6)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).transpose(1, 2)


def trained(model: nn.Module, data: Any, micro: int, **settings: Any) -> dict[str, torch.Tensor]:
    """The weights after one step on all eight rows, in micro-batches."""
    model = copy.deepcopy(model)
    options = {
        "batch_size": 8,
        "micro_batch_size": micro,
        "optimizer": "SGD",
        "lr": 0.5,
        "epochs": 1,
        "device": "cpu",
        "output": f"run-{micro}",
    }
    Trainer(model, data, plugins=[{"log": False}, {"progress": False}], **options, **settings).fit()
    return model.state_dict()


def raw(model: nn.Module, loss: Any) -> dict[str, torch.Tensor]:
    """The weights after a step of a hand-written loop on all rows at once."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss(model).backward()
    optimizer.step()
    return model.state_dict()


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("kind", MODELS)
def test_a_transformers_model_gives_the_weights_of_one_batch(kind):
    torch.manual_seed(0)
    model, rows = MODELS[kind](), samples(3)
    expected = raw(model, lambda copied: copied(**stacked(rows)).loss)
    for micro in (8, 2, 1):
        torch.testing.assert_close(trained(model, rows, micro), expected, rtol=1e-5, atol=1e-6)


LOSSES = {
    "function": functional.cross_entropy,
    "partial": partial(functional.cross_entropy, ignore_index=0, label_smoothing=0.1),
    "module": nn.CrossEntropyLoss(),
    "weighted module": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_gives_the_weights_of_one_batch(name):
    rows, model, loss = samples(3), Scores(), LOSSES[name]
    if name == "partial":
        rows = [row | {"labels": row["labels"].clamp(min=0)} for row in rows]
    batch = stacked(rows)
    expected = raw(model, lambda copied: loss(copied(batch["input_ids"]), batch["labels"]))
    pairs = [(row["input_ids"], row["labels"]) for row in rows]
    for micro in (8, 2):
        torch.testing.assert_close(trained(model, pairs, micro, loss=loss), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_an_evaluation_leaves_out_batches_without_a_target(size):
    rows, model = samples(3), Scores()
    batch = stacked(rows)
    pairs = [(row["input_ids"], row["labels"]) for row in rows]
    settings = {"eval_batch_size": size, "batch_size": 8, "device": "cpu", "output": "run", "max_steps": 1}
    found = Trainer(model, pairs, loss=functional.cross_entropy, **settings).validate(pairs)  # type: ignore[arg-type]
    expected = functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_split_without_a_target_has_no_loss():
    pairs = [(row["input_ids"], torch.full((6,), -100)) for row in samples(3)]
    settings = {"batch_size": 8, "device": "cpu", "output": "run", "max_steps": 1}
    found = Trainer(Scores(), pairs, loss=functional.cross_entropy, **settings).validate(pairs)  # type: ignore[arg-type]
    assert math.isnan(found["loss"])


@pytest.mark.parametrize("targets", [0, 2])
def test_a_weight_of_zero_is_a_batch_without_targets(targets):
    """A collator with a count of its own, which finds no target in some micro-batches."""

    def collate(rows: list[Any]) -> Batch:
        inputs = torch.stack([row[0] for row in rows])
        labels = torch.stack([row[1] for row in rows])
        return Batch((inputs, labels), loss_weight=float((~labels.isnan()).sum()))

    def mean(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        known = ~labels.isnan()
        return (predictions[known] - labels[known]).square().mean()

    torch.manual_seed(0)
    inputs, labels, model = torch.randn(8, 3), torch.randn(8, 3), nn.Linear(3, 3)
    labels[:4, targets:] = torch.nan
    expected = raw(model, lambda copied: mean(copied(inputs), labels))
    data = DataLoader(list(zip(inputs, labels, strict=True)), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    model_of = copy.deepcopy(model)
    settings = {"micro_batch_size": 1, "optimizer": "SGD", "lr": 0.5, "epochs": 1, "device": "cpu", "output": "run"}
    Trainer(model_of, data, plugins=[{"log": False}, {"progress": False}], loss=mean, **settings).fit()
    torch.testing.assert_close(model_of.state_dict(), expected, rtol=1e-5, atol=1e-6)


def test_the_weight_that_a_collator_sets_is_kept():
    def collate(rows: list[Any]) -> Batch:
        return Batch(stacked(rows), loss_weight=len(rows))

    rows = samples(3)
    torch.manual_seed(0)
    model = MODELS["tags"]()

    def by_samples(copied: nn.Module) -> torch.Tensor:
        return torch.stack([copied(**stacked(rows[at : at + 2])).loss for at in range(0, 8, 2)]).mean()

    data = DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type] # rows are a map-style dataset
    model_of = copy.deepcopy(model)
    Trainer(
        model_of, data, plugins=[{"log": False}, {"progress": False}], micro_batch_size=2, optimizer="SGD", lr=0.5,
        epochs=1, device="cpu", output="run",
    ).fit()  # fmt: skip
    torch.testing.assert_close(model_of.state_dict(), raw(model, by_samples), rtol=1e-5, atol=1e-6)


def test_one_target_for_each_sample_needs_no_batch():
    """A plugin that wraps the collator, such as a mixup, reads (inputs, targets)."""
    from torch.utils.data import default_collate

    from fastloop_plugins.tasks.shared.collate import TargetCounter

    rows = [(torch.ones(2), number % 3) for number in range(4)]
    _, targets = TargetCounter(default_collate, functional.cross_entropy)(rows)
    assert targets.tolist() == [0, 1, 2, 0]
    rows[0] = (torch.ones(2), -100)
    assert TargetCounter(default_collate, functional.cross_entropy)(rows).loss_weight == 3


@pytest.mark.parametrize(
    ("mask", "tokens"), [([[1, 1, 1], [1, 0, 0]], 4), (None, 6)], ids=["with a mask", "without a mask"]
)
def test_tokens_without_padding_are_counted(mask, tokens):
    from torch.utils.data import default_collate

    from fastloop_plugins.tasks.shared.collate import TargetCounter

    rows = [{"input_ids": torch.arange(3), "labels": 0} for _ in range(2)]
    if mask is not None:
        rows = [row | {"attention_mask": torch.tensor(kept)} for row, kept in zip(rows, mask, strict=True)]
    batch = TargetCounter(default_collate, None)(rows)
    assert (batch.samples, batch.loss_weight, batch.tokens) == (2, 2, tokens)


def test_a_run_of_a_model_of_transformers_has_its_tokens_per_second(tmp_path):
    model = MODELS["tags"]()
    settings = {"batch_size": 4, "epochs": 1, "device": "cpu", "output": str(tmp_path / "run")}
    summary = Trainer(model, samples(3), plugins=[{"log": False}, {"progress": False}], **settings).fit()
    tokens = sum(len(row["input_ids"]) for row in samples(3))  # they have no mask
    assert summary["tokens_per_second"] * summary["train_seconds"] == pytest.approx(tokens, rel=1e-3)


def test_class_weights_replace_the_weight_of_a_collator():
    from fastloop_plugins.tasks.shared.collate import TargetCounter
    from fastloop_plugins.tasks.shared.losses import ClassLoss

    loss = ClassLoss({"name": "cross_entropy", "class_weights": [1.0, 2.0, 5.0]}, "here")
    loss.set_weights(lambda: None)
    counter = TargetCounter(lambda rows: Batch((torch.ones(len(rows), 2), torch.tensor(rows)), loss_weight=9), loss)
    assert counter([0, 1, 2, 2]).loss_weight == 13


def weights_on_a_process() -> dict[str, torch.Tensor]:
    pairs = [(row["input_ids"], row["labels"]) for row in samples(3)]
    model = Scores()
    options = {"batch_size": 8, "optimizer": "SGD", "lr": 0.5, "epochs": 1, "device": "cpu", "output": "run"}
    Trainer(
        model, pairs, plugins=["ddp", {"log": False}, {"progress": False}], loss=functional.cross_entropy, **options
    ).fit()
    return model.state_dict()


def test_two_processes_give_the_weights_of_one_batch(processes: Any):
    batch = stacked(samples(3))
    expected = raw(Scores(), lambda copied: functional.cross_entropy(copied(batch["input_ids"]), batch["labels"]))
    ended: list[ProcessResult] = processes(2, weights_on_a_process)
    for process in ended:
        torch.testing.assert_close(process.result, expected, rtol=1e-5, atol=1e-6)


def test_a_recipes_module_counts_targets(tmp_path):
    """``module`` with a loss by name, and with a model that computes its own loss."""
    from training_runs import execute

    from fastloop.lifecycle import build
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    (tmp_path / "own.py").write_text(
        "from test_target_counts import MODELS, Scores, samples\n"
        "import torch\n"
        "def pairs(): return {'train': [(row['input_ids'], row['labels']) for row in samples(3)]}\n"
        "def mappings(): return {'train': samples(3)}\n"
        "def tagger():\n    torch.manual_seed(0)\n    return MODELS['tags']()\n"
    )
    for model, data, task in (("Scores", "pairs", {"loss": "cross_entropy"}), ("tagger", "mappings", {})):
        found = []
        for micro in (8, 2):
            tree = {"model": {"module": f"{tmp_path}/own.py:{model}"}, "data": {"module": f"{tmp_path}/own.py:{data}"}}
            train = {
                "optimizer": "SGD",
                "lr": 0.5,
                "batch_size": 8,
                "micro_batch_size": micro,
                "epochs": 1,
                "device": "cpu",
            }
            plugins = [{"module": task}, {"log": False}, {"progress": False}]
            recipe = make_recipe(
                tree | {"train": train, "plugins": plugins, "output": str(tmp_path / f"{model}-{micro}")}
            )
            run = build(resolve(recipe))
            execute(run)
            found.append(run.unwrap_model().state_dict())
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
