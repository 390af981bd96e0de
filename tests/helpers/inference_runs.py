"""Trained runs for the tests of `fastloop evaluate` and `fastloop predict`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from text_helpers import TINY
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe

CLASSES = ("bad", "fine", "good")
WORDS = {"bad": "dull dreadful bore", "fine": "plain decent usual", "good": "lovely superb fine"}
TRAIN = {"epochs": 3, "batch_size": 8, "lr": 1e-2, "device": "cpu", "save_every": None}


def texts(count: int, offset: int = 0) -> list[dict[str, str]]:
    """Rows of ``text`` and ``label``, of different lengths. A tenth of the labels is wrong, so that metrics are not
    1."""
    rows = []
    for index in range(offset, offset + count):
        label = CLASSES[index % 3]
        words = WORDS[label].split()
        text = f"a {words[index % 3]} film number {index % 17}" + " indeed" * (index * 7 % 12)
        rows.append({"text": text, "label": CLASSES[(index + 1) % 3] if index % 10 == 9 else label})
    return rows


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as csv with a header line."""
    rows = list(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_recipe(folder: Path, plugins: Iterable[Any] = (), **sections: Any) -> Path:
    """A recipe and its files in a folder: a tiny classifier of three classes."""
    files = {"train": 60, "validation": 24, "test": 30}
    for number, (split, count) in enumerate(files.items()):
        write_csv(folder / f"{split}.csv", texts(count, 100 * number))
    recipe = {
        "model": {"config": TINY, "tokenizer": {"kind": "word"}},
        "data": {
            "files": {split: f"{split}.csv" for split in files},
            "text": "text",
            "label": "label",
            "max_length": 32,
        },
        "train": TRAIN,
        "plugins": list(plugins),
        "output": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | sections), encoding="utf-8")
    return path


def train(recipe: Path) -> dict[str, Any]:
    """Train a recipe in this process; returns its summary."""
    loaded = load_recipe(str(recipe))
    loaded.plugins |= {"progress": False}
    return execute(build(resolve(loaded)))
