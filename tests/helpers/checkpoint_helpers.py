"""Shared by the tests of checkpoints and tasks: small files, checkpoints as save_pretrained writes them, and runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.run import Run

DISTILBERT = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
WORDS = {"A": ("fine", "lovely", "bright"), "B": ("dull", "dreadful", "grey"), "C": ("long", "wide", "tall")}
"""Class -> the words that its texts have."""


def write_rows(names: Sequence[Any], path: str = "rows.jsonl", count: int = 48) -> str:
    """Rows of ``text`` and ``label``, every class in turn. ``names``: what the file calls the classes of ``WORDS``."""
    kinds = list(WORDS)[: len(names)]
    rows = [
        {
            "text": f"a {WORDS[kinds[index % len(kinds)]][index // len(kinds) % 3]} film {index}",
            "label": names[index % len(kinds)],
        }
        for index in range(count)
    ]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenizer(ends: bool = False, path: str = "rows.jsonl") -> PreTrainedTokenizerFast:
    """A word tokenizer of a file's texts. ``ends``: put an end token behind each text, as T5's does."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    made.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"]))
    if ends:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **special)


def save_checkpoint(
    auto: Any, config: Mapping[str, Any], folder: str = "checkpoint", ends: bool = False, **fields: Any
) -> Any:
    """A model with random weights, saved with its tokenizer; returns it.

    Args:
        auto: The Auto class of its head.
        fields: Further fields of its configuration, such as ``id2label``.
    """
    words = tokenizer(ends)
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(**config, vocab_size=len(words), pad_token_id=0, **fields))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model


def text_recipe(
    task: str,
    model: Mapping[str, Any] | str,
    data: Mapping[str, Any] | None = None,
    plugins: Sequence[Any] = (),
    **train: Any,
) -> Recipe:
    """A recipe of a text task. ``model``: the section, or a checkpoint's folder; ``data``: more keys beside the
    file."""
    tree = {
        "model": {"name": model} if isinstance(model, str) else dict(model),
        "data": {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": 16} | dict(data or {}),
        "train": {"epochs": 1, "batch_size": 8, "lr": 1e-2, "device": "cpu", "save_every": None} | train,
        "plugins": [task, *plugins, {"log": False}, {"progress": False}],
        "output": "run",
    }
    return make_recipe(tree, Path("recipe.yaml"))


def text_run(task: str, model: Mapping[str, Any] | str, data: Mapping[str, Any] | None = None, **arguments: Any) -> Run:
    """The run of ``text_recipe``, built and not executed."""
    recipe = text_recipe(task, model, data, **arguments)
    return build(resolve(recipe))
