"""A text task as another package has it: it uses public names of fastloop alone, and declares its traits."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from fastloop import Batch, Output, Plugin, Trait, hookimpl
from fastloop.recipe import Recipe

PAD, CLS, WORDS = 0, 1, 2


class Texts:
    """Rows of a CSV file as word ids, each after a first token."""

    deterministic = True

    def __init__(self, rows: list[dict[str, str]], vocabulary: Mapping[str, int]) -> None:
        self.labels = [int(row["label"]) for row in rows]
        self.ids = [torch.tensor([CLS, *(vocabulary[word] for word in row["text"].split())]) for row in rows]
        self.lengths = [len(ids) for ids in self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "label": self.labels[index]}


class Pad:
    """Pads samples on the right."""

    deterministic = True

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [sample["input_ids"] for sample in samples]
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
        labels = torch.tensor([sample["label"] for sample in samples])
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}
        return Batch(inputs, tokens=sum(map(len, rows)))


class ReviewTask(Plugin):
    """Two classes of texts."""

    name = "review-task"
    slot = "task"
    description = "classifies reviews"

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> Collection[Trait]:
        return {"token-ids", "padded", "output-per-text", "deterministic"}

    @hookimpl
    def build_datasets(self, run: Any) -> Mapping[str, Texts]:
        splits = {}
        for split, name in run.recipe.data["files"].items():
            with Path(run.recipe.find(name)).open(newline="") as file:
                splits[split] = list(csv.DictReader(file))
        words = sorted({word for rows in splits.values() for row in rows for word in row["text"].split()})
        self.vocabulary = {word: index for index, word in enumerate(words, WORDS)}
        return {split: Texts(rows, self.vocabulary) for split, rows in splits.items()}

    @hookimpl
    def build_collator(self) -> Pad:
        return Pad()

    @hookimpl
    def build_model(self, run: Any) -> torch.nn.Module:
        options = {**run.recipe.model["config"], "vocab_size": WORDS + len(self.vocabulary), "pad_token_id": PAD}
        model: torch.nn.Module = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**options))
        return model

    @hookimpl
    def compute_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> Output:
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits.float()
        return Output(cross_entropy(logits, batch["labels"]), logits, batch["labels"])
