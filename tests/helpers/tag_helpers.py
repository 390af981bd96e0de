"""Helpers for the tests of ``token-classification``: sentences, files with them, small runs, and independent tags."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from text_loops import DISTILBERT, TRAIN
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.run import Run
from fastloop_plugins.datasets.dispatches import dispatches

TASK = "token-classification"
SCRATCH: dict[str, Any] = {
    "config": DISTILBERT | {"max_position_embeddings": 64},
    "tokenizer": {"kind": "bpe", "vocab_size": 320},
}
SPLITS = {"train": 40, "validation": 16, "test": 20}
TAGS = ["B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"]

Row = Mapping[str, list[str]]


def write_conll(path: str, rows: Iterable[Row]) -> str:
    """Write rows in the format of CoNLL-2003: word, part of speech, chunk and tag, separated by spaces."""
    lines = ["-DOCSTART- -X- -X- O", ""]
    for row in rows:
        lines += [f"{word} NN B-NP {tag}" for word, tag in zip(row["words"], row["tags"], strict=True)] + [""]
    Path(path).write_text("\n".join(lines), encoding="utf-8")
    return path


def write_jsonl(path: str, rows: Iterable[Mapping[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_splits() -> dict[str, Any]:
    """Write the splits as CoNLL files; returns a ``data`` section."""
    found = dispatches(**SPLITS)
    return {"files": {split: write_conll(f"{split}.conll", rows) for split, rows in found.items()}, "max_length": 64}


def make(
    data: Mapping[str, Any],
    model: Mapping[str, Any] = SCRATCH,
    task: Mapping[str, Any] | None = None,
    plugins: Any = (),
    resume: Path | None = None,
    output: str = "run",
    **train: Any,
) -> Run:
    """Write ``recipe.yaml``, and build its run."""
    listed = [{TASK: dict(task or {})}, *plugins]
    tree = {
        "model": dict(model),
        "data": dict(data),
        "train": TRAIN | {"device": "cpu"} | train,
        "plugins": listed,
        "output": output,
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    recipe = load_recipe("recipe.yaml")
    recipe.plugins |= {"progress": False}
    return build(resolve(recipe), resume=resume)


def trained(*arguments: Any, **settings: Any) -> Run:
    """Train a run of ``make``."""
    run = make(*arguments, **settings)
    execute(run)
    return run


def tags_by_hand(folder: Path, sentences: Iterable[list[str]]) -> list[tuple[list[str], list[float]]]:
    """The tag of each word and its probability, by transformers' classes and the first token of each word."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for words in sentences:
        inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            probabilities, best = model(**inputs).logits[0].softmax(-1).max(-1)
        ids = inputs.word_ids()
        firsts = [ids.index(word) for word in range(len(words))]
        found.append(
            (
                [model.config.id2label[int(best[place])] for place in firsts],
                [float(probabilities[place]) for place in firsts],
            )
        )
    return found
