"""A text task as another package has it: it uses public names of fastloop alone, and declares its traits."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fastloop import Batch, Output, Plugin, Trait, hookimpl
from fastloop.recipe import Recipe
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.text.batches import Ragged
from fastloop_plugins.text.next_token_loss import add_loss
from fastloop_plugins.text.sequences import cache_token_ids

PAD = 0
CLS = 1
WORDS = 2


class Texts:
    """Rows of a CSV file as word ids, each after a first token."""

    deterministic = True

    def __init__(self, rows: list[dict[str, str]], vocabulary: Mapping[str, int]) -> None:
        texts = [row["text"] for row in rows]
        encoded = ([CLS, *(vocabulary[word] for word in text.split())] for text in texts)
        self.ids, self.lengths = cache_token_ids([*vocabulary, "texts", *texts], encoded)
        self.ends = self.lengths.cumsum()
        self.labels = [int(row["label"]) for row in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = self.ends[index]
        return {"input_ids": self.ids[end - self.lengths[index] : end], "label": self.labels[index]}


class Pad:
    """Pads samples on the right."""

    deterministic = True

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [torch.tensor(sample["input_ids"], dtype=torch.int64) for sample in samples]
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
        labels = torch.tensor([sample["label"] for sample in samples])
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}
        return Batch(inputs, tokens=sum(map(len, rows)))


class ReviewTask(Plugin):
    """Classifies reviews."""

    name = "review-task"
    slot = "task"

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> Collection[Trait]:
        return {"token-ids", "padded", "output-per-text", "deterministic", "cached-token-ids"}

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


class PadTargets:
    """Pads word ids, and their next words as targets."""

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        batch = self.ragged(samples)
        inputs = {
            name: pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, float(fill))
            for name, (rows, fill) in batch.columns.items()
        }
        return Batch(inputs, loss_weight=batch.loss_weight, tokens=batch.tokens)

    def ragged(self, samples: list[dict[str, Any]]) -> Ragged:
        """The batch before padding."""
        rows = [sample["input_ids"] for sample in samples]
        targets = [np.array([*row[1:], IGNORED]) for row in rows]
        columns = {"input_ids": (rows, PAD), "targets": (targets, IGNORED)}
        tokens = sum(map(len, rows))
        return Ragged(columns=columns, loss_weight=tokens - len(rows), tokens=tokens)


class WordTask(ReviewTask):
    """The next word of texts."""

    name = "word-task"

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> Collection[Trait]:
        return {"token-ids", "padded", "next-token-loss"}

    @hookimpl
    def build_collator(self) -> PadTargets:  # type: ignore[override]
        return PadTargets()

    @hookimpl
    def build_model(self, run: Any) -> torch.nn.Module:
        options = {**run.recipe.model["config"], "vocab_size": WORDS + len(self.vocabulary), "pad_token_id": PAD}
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
        add_loss(model)
        return model

    @hookimpl
    def compute_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> Output:
        return Output(model(**batch, use_cache=False).loss)
