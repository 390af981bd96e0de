"""A tiny pretrained classifier of texts, and its training as a plain loop of torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from text_helpers import TINY, make_run
from torch import Tensor
from training_runs import execute
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.run import Run

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILBERT = TINY | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
EPOCHS = 2
BATCH = 8
LR = 1e-2
SEED = 7
TRAIN = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "seed": SEED, "optimizer": "SGD"}


def pretrained(task: str, config: dict[str, Any], data: dict[str, Any]) -> str:
    """A folder with an untrained model and a tokenizer for the texts of ``data``."""
    run = make_run(task, {"config": config, "tokenizer": {"kind": "word"}}, data)
    plugin: Any = next(plugin for plugin in run.plugins.plugins if plugin.name == task)
    plugin.text_model.export(run, Path("pretrained"))
    return "pretrained"


def trained(
    model: dict[str, Any],
    data: dict[str, Any],
    plugins: Sequence[Any] = ("text-classification",),
    output: str = "run",
    resume: Path | None = None,
    **train: Any,
) -> Run:
    """Write ``recipe.yaml`` and train it."""
    tree = {
        "model": model,
        "data": data,
        "train": TRAIN | {"device": "cpu"} | train,
        "plugins": list(plugins),
        "output": output,
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    recipe = load_recipe("recipe.yaml")
    recipe.plugins |= {"progress": False}
    run = build(resolve(recipe), resume=resume)
    execute(run)
    return run


def plain_loop(
    folder: str,
    columns: Sequence[Sequence[str]],
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    max_length: int = 32,
) -> dict[str, Tensor]:
    """Train ``folder`` with SGD on the batches that fastloop documents: one permutation an epoch. Returns the weights.

    Args:
        columns: The tokenizer's arguments ``text`` and, for pairs, ``text_pair``.
        loss: Logits and targets of a batch -> its mean loss.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.0)
    model.train()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(SEED + epoch))
        for ids in order.split(BATCH):
            texts = [[column[index] for index in ids.tolist()] for column in columns]
            inputs = tokenizer(*texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
            loss(model(**inputs).logits, targets[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, Tensor] = model.state_dict()
    return state
