"""The run folder's ``model/`` loads with ``from_pretrained``; batches that a model cannot take are named by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training_runs import execute
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from fastloop import Trainer, UsageError
from fastloop.lifecycle import build
from fastloop.testing import assert_problem, expect_problem, find_problems, tiny_data

QUIET: list[Any] = [{"log": False}, {"progress": False}]
WORDS = ["[PAD]", "[UNK]", "good", "bad", "film"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16)


def bert() -> DistilBertForSequenceClassification:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=len(WORDS),
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=16,
        id2label={0: "BAD", 1: "GOOD"},
    )
    return DistilBertForSequenceClassification(config)


class Reviews(Dataset[dict[str, Any]]):
    def __init__(self, tokenizer: Any, label: str) -> None:
        self.tokenizer, self.label = tokenizer, label

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = self.tokenizer(("bad film", "good good film")[index % 2], return_token_type_ids=False)
        return {**found, self.label: index % 2}


def stacked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads and keeps names, while ``DataCollatorWithPadding`` renames ``label``."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        name: torch.tensor(
            [
                sample[name] + [0] * (longest - len(sample[name])) if isinstance(sample[name], list) else sample[name]
                for sample in samples
            ]
        )
        for name in samples[0]
    }


def fit(model: nn.Module, loader: Any, **settings: Any) -> Trainer:
    trainer = Trainer(
        model, loader, plugins=QUIET, **{"epochs": 1, "lr": 1e-2, "output": "run", "device": "cpu"} | settings
    )
    trainer.fit()
    return trainer


def test_a_hugging_face_model_and_its_tokenizer_load_from_the_run_folder(tokenizer):
    model = bert()
    loader = DataLoader(Reviews(tokenizer, "label"), batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))
    fit(model, loader, processing_class=tokenizer)
    again = AutoModelForSequenceClassification.from_pretrained("run/model")
    assert again.config.id2label == {0: "BAD", 1: "GOOD"}
    words = AutoTokenizer.from_pretrained("run/model")
    batch = words(["good film", "bad"], padding=True, return_tensors="pt", return_token_type_ids=False)
    assert batch["input_ids"].tolist() == [[2, 4], [3, 0]]
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, model.eval()(**batch).logits)
    assert not torch.equal(again.classifier.weight, bert().classifier.weight), "it was trained"


def test_a_module_that_torch_compile_returned_is_exported_under_its_own_name(tokenizer):
    model = bert()
    model.distilbert = torch.compile(model.distilbert, backend="eager")
    loader = DataLoader(Reviews(tokenizer, "label"), batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))
    fit(model, loader)
    again = AutoModelForSequenceClassification.from_pretrained("run/model")
    trained = model.distilbert._orig_mod.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in again.distilbert.state_dict().items())


def test_the_task_module_exports_so_too(tmp_path):
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    Path("hub.py").write_text(
        "import torch\nfrom torch import nn\nfrom huggingface_hub import PyTorchModelHubMixin\n\n\n"
        "class Net(nn.Module, PyTorchModelHubMixin):\n    def __init__(self, width: int = 3):\n        "
        "super().__init__()\n"
        "        self.layer = nn.Linear(8, width)\n\n    def forward(self, inputs):\n        return "
        "self.layer(inputs)\n\n\n"
        "def data():\n    inputs = torch.randn(16, 8)\n"
        "    return {'train': torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))}\n"
    )
    sections = {"model": {"module": "hub.py:Net"}, "data": {"module": "hub.py:data"}}
    tree = sections | {
        "train": {"epochs": 1, "batch_size": 4, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy"}}, *QUIET],
    }
    recipe = make_recipe(tree | {"output": "run"}, Path("recipe.yaml"))
    run = build(resolve(recipe))
    execute(run)
    again: Any = type(run.unwrap_model()).from_pretrained("run/model")
    assert torch.equal(again.layer.weight, run.unwrap_model().layer.weight)
    assert Path("run/model/config.json").is_file()


class HubNet(nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(8, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def test_any_model_with_save_pretrained_is_written_by_it():
    model = HubNet(width=7)
    fit(model, tiny_data(16), loss=nn.functional.cross_entropy, batch_size=4)
    again = HubNet.from_pretrained("run/model")
    assert again.width == 7
    assert torch.equal(again.layer.weight, model.layer.weight)


def test_a_processing_class_that_cannot_be_saved_is_refused():
    with expect_problem("wrong-type processing_class save_pretrained", UsageError):
        fit(nn.Linear(8, 3), tiny_data(16), processing_class={}, batch_size=4)


def test_labels_under_another_name_are_found_at_the_first_batch(tokenizer):
    loader = DataLoader(Reviews(tokenizer, "label"), batch_size=4, collate_fn=stacked)
    with expect_problem("no-loss input_ids, attention_mask, label 'label' 'labels'", UsageError):
        fit(bert(), loader)
    assert fit(bert(), DataLoader(Reviews(tokenizer, "labels"), batch_size=4, collate_fn=stacked)).run.state.step == 3


@pytest.mark.parametrize("label", ["labels", "label", "label_ids"])
def test_a_processing_class_names_labels_as_the_collator_of_transformers_does(tokenizer, label, tmp_path):
    data = Reviews(tokenizer, label)
    padded = DataLoader(data, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))
    losses = []
    for given in ({"train_loader": data, "batch_size": 4}, {"train_loader": padded}):
        trainer = Trainer(
            bert(), **given, processing_class=tokenizer, plugins=QUIET, epochs=1, output=tmp_path / str(len(losses))
        )
        losses.append(trainer.validate(given["train_loader"])["loss"])
    assert losses[0] == losses[1]


class Strict(nn.Module):
    """Takes what it names, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return (
            {"logits": logits}
            if labels is None
            else {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}
        )


def test_a_loss_replaces_that_of_a_model_of_transformers(tokenizer, tmp_path):
    data = Reviews(tokenizer, "labels")
    loss = nn.CrossEntropyLoss(label_smoothing=0.3)
    model = bert()
    with torch.no_grad():
        model.classifier.weight *= 50  # logits far from 0, where smoothing changes the loss
    trainer = Trainer(model, data, processing_class=tokenizer, loss=loss, batch_size=4, output=tmp_path / "run")
    padded = DataCollatorWithPadding(tokenizer)([data[index] for index in range(12)])
    with torch.no_grad():
        result = model.eval()(**padded)
    smoothed = loss(result.logits, padded["labels"]).item()
    assert trainer.validate(data)["loss"] == pytest.approx(smoothed, rel=1e-5)
    assert abs(smoothed - result.loss.item()) > 5e-4, "smoothing shows at this precision"


def test_a_loss_that_is_not_used_is_mentioned(caplog):
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return dict(zip(("x", "labels"), torch.utils.data.default_collate(samples), strict=True))

    class OwnLoss(Strict):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(x, labels)["loss"]}

    fit(OwnLoss(), DataLoader(tiny_data(16), batch_size=4, collate_fn=collate), loss=nn.functional.cross_entropy)
    assert_problem(caplog, "loss-not-used loss: logits OwnLoss")
    assert len(find_problems(caplog, "loss-not-used")) == 1


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            ("x", "label"),
            "wrong-batch 'label' 'labels'",
        ),
        (("x", "lables"), "wrong-batch 'labels'"),
        (
            ("labels",),
            "wrong-batch 1 'x'",
        ),
        (("x",), "no-loss"),
    ],
)
def test_keys_that_the_model_does_not_take_are_named(keys, expected):
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        inputs, labels = torch.utils.data.default_collate(samples)
        return {key: inputs if key == "x" else labels for key in keys}

    with expect_problem(expected, UsageError):
        fit(Strict(), DataLoader(tiny_data(16), batch_size=4, collate_fn=collate))
