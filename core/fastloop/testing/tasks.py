"""Small tasks for tests, as recipe sections. They train quickly and download nothing.

The text tasks read the files that ``write_texts`` writes into the current folder.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

_MODULE_OPTIONS = {"loss": "cross_entropy", "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}}

VECTORS: Mapping[str, Any] = {
    "model": {"module": "fastloop.testing.tasks:Network"},
    "data": {"module": "fastloop.testing.tasks:vectors"},
    "plugins": [{"module": _MODULE_OPTIONS}],
}
"""Vectors of 8 numbers in three classes, and a network of two layers with layer norm and dropout; batches are
``(inputs, targets)``."""

IMAGES: Mapping[str, Any] = {
    "model": {"module": "fastloop.testing.tasks:Convolutions"},
    "data": {"module": "fastloop.testing.tasks:images"},
    "plugins": [{"module": _MODULE_OPTIONS}],
}
"""Images of 3 x 8 x 8 in three classes, and two convolutions."""

_FILES = {"train": "texts/train.jsonl", "validation": "texts/validation.jsonl"}

TEXTS: Mapping[str, Any] = {
    "model": {
        "config": {
            "model_type": "bert",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 48,
            "initializer_range": 0.2,
        },
        "tokenizer": {"kind": "word"},
    },
    "data": {"files": _FILES, "label": "label", "max_length": 32},
}
"""Texts of 3 to 20 words with a label, and a BERT of two layers."""

LANGUAGE: Mapping[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 48,
            "attention_dropout": 0.1,
        },
        "tokenizer": {"kind": "word"},
    },
    "data": {"files": _FILES, "max_length": 16},
}
"""The same texts without their labels, and a Llama of two layers."""

DROPOUT_KEYS = {"bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"), "llama": ("attention_dropout",)}
"""Type of a model of transformers -> its dropout rates."""

SIZES = {"train": 35, "validation": 16}
"""Samples of each split: the last batch of 8 is a short one."""


def with_dropout(task: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """A copy of a task of this module with another dropout rate, from 0 (no dropout) to 1:
    ``with_dropout(TEXTS, 0.0)``."""
    model = dict(task["model"])
    if "module" in model:
        model["arguments"] = {**model.get("arguments", {}), "dropout": rate}
    else:
        model["config"] = model["config"] | dict.fromkeys(DROPOUT_KEYS[model["config"]["model_type"]], rate)
    return {**task, "model": model}


def with_batch_norm(task: Mapping[str, Any]) -> dict[str, Any] | None:
    """A copy of a task whose model normalizes over the batch. None: only the models of ``VECTORS`` and ``IMAGES``
    can."""
    model = dict(task.get("model", {}))
    if model.get("module") not in (VECTORS["model"]["module"], IMAGES["model"]["module"]):
        return None
    model["arguments"] = {**model.get("arguments", {}), "batch_norm": True}
    return {**task, "model": model}


class Network(nn.Module):
    """Two layers and a layer norm, or a batch norm. The run's seed determines the weights."""

    def __init__(self, dropout: float = 0.1, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 13)
        self.norm = nn.BatchNorm1d(13) if batch_norm else nn.LayerNorm(13)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, 8) float32 -> (batch, 3) scores."""
        scores: torch.Tensor = self.second(self.dropout(self.norm(self.first(inputs)).relu()))
        return scores


class Convolutions(nn.Sequential):
    """Two convolutions, pooled; the first with batch norm, if ``batch_norm`` is True."""

    def __init__(self, dropout: float = 0.1, batch_norm: bool = False) -> None:
        norm = [nn.BatchNorm2d(8)] if batch_norm else []
        last = (nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        super().__init__(nn.Conv2d(3, 8, 3), *norm, nn.ReLU(), nn.Dropout(dropout), *last)


def _split(split: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(list(SIZES).index(split))
    inputs = torch.randn(SIZES[split], 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def vectors() -> dict[str, TensorDataset]:
    """Vectors (8, float32). The class (int64) is the index of the largest of the first three numbers."""
    return {"train": _split("train"), "validation": _split("validation")}


def images() -> dict[str, TensorDataset]:
    """Images (3, 8, 8, float32): each channel is one of a vector's first three numbers, with noise from all eight."""
    splits = {}
    for name, dataset in vectors().items():
        inputs, targets = dataset.tensors
        noise = inputs.repeat(1, 24).unflatten(1, (3, 8, 8))  # type: ignore[no-untyped-call]
        splits[name] = TensorDataset((inputs[:, :3, None, None] + 0.1 * noise).contiguous(), targets)
    return splits


def write_texts(folder: Path) -> None:
    """Write texts of 3 to 20 words with two labels. About every third word depends on the label."""
    (folder / "texts").mkdir(exist_ok=True)
    for split, size in SIZES.items():
        rng = random.Random(split)
        rows = []
        for index in range(size):
            label_words = (("fine", "lovely"), ("dull", "dreadful"))[index % 2]
            words = [
                rng.choice(label_words) if rng.random() < 0.3 else f"word{rng.randrange(50)}"
                for _ in range(rng.randrange(2, 20))
            ]
            words.insert(rng.randrange(len(words) + 1), rng.choice(label_words))
            rows.append({"text": " ".join(words), "label": index % 2})
        (folder / "texts" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
