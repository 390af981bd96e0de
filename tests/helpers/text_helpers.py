"""Shared by the tests of the text tasks: recipes from mappings, small files, a tiny pretrained model."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop.testing import TEXTS, write_texts

TINY = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}
TINY_GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16}
GOOD = "a fine and lovely film"
BAD = "a dull and dreadful bore"


def rows(count: int = 24, labels: tuple[Any, Any] = (0, 1)) -> list[dict[str, Any]]:
    """Rows of ``text`` and ``label``, all different, the two labels in turn."""
    return [
        {"text": f"{(BAD, GOOD)[i % 2]} number {i}" + " indeed" * (i % 5), "label": labels[i % 2]} for i in range(count)
    ]


def write_rows(path: str, content: list[dict[str, Any]]) -> str:
    """Write rows in the format of the suffix: .csv, .tsv, .json, .parquet, or else .jsonl. Returns the path."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(content[0]), delimiter="," if file.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(content)
    elif file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(content), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(content))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def make_run(
    task: str, model: Mapping[str, Any], data: Mapping[str, Any], objects: Iterable[Plugin] = (), **train: Any
) -> Run:
    """A run of one task, logging aside; ``objects``: further plugins."""
    train = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "device": "cpu"} | train
    tree = {"model": dict(model), "data": dict(data), "train": train, "output": "run"}
    recipe = make_recipe(
        tree | {"plugins": [task, {"log": False}, {"progress": False}, {"module": False}]}, Path("recipe.yaml")
    )
    return build(resolve(recipe, objects=objects))


def build_on_short_texts(config: dict[str, Any], *objects: Plugin) -> Run:
    """A run of a new model on texts of 1 to 25 words: ``causal-lm`` for GPT-2 and Llama, or ``text-classification``."""
    lines = [
        f"{('bad', 'good')[i % 2]} {' '.join(f'w{(i * k) % 7}' for k in range(i * 5 % 25))},{i % 2}\n"
        for i in range(40)
    ]
    Path("a.csv").write_text("text,label\n" + "".join(lines))
    data: dict[str, Any] = {"files": {"train": "a.csv", "validation": "a.csv"}, "max_length": 32}
    task = "causal-lm" if config["model_type"] in ("gpt2", "llama") else "text-classification"
    data |= {"label": "label"} if task == "text-classification" else {}
    return make_run(task, {"config": config, "tokenizer": {"kind": "word"}}, data, objects)


def train_to_numbers(config: dict[str, Any], *objects: Plugin) -> list[float]:
    """The loss of an evaluation after training on short texts, and the norms of all weights. Biases of keys have no
    gradient but rounding, and are left out."""
    made = build_on_short_texts(config, *objects)
    summary = execute(made)
    weights = made.unwrap_model().named_parameters()
    keys = ("key.bias", "k_lin.bias", "c_attn.bias")
    return [
        summary["validation"]["loss"],
        *(float(w.detach().norm()) for name, w in weights if not name.endswith(keys)),
    ]


def text_run(*plugins: Any, output: str = "texts-run", **options: Any) -> Any:
    """A built run of a tiny BERT without dropout, on unbalanced labels."""
    write_texts(Path.cwd())
    file = Path("texts/train.jsonl")
    lines = file.read_text().splitlines()
    kept = [line for index, line in enumerate(lines) if json.loads(line)["label"] == 0 or index % 3 == 0]
    file.write_text("".join(f"{line}\n" for line in kept))
    config = {**TEXTS["model"]["config"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    micro = {"micro_batch_size": options.pop("micro_batch_size")} if "micro_batch_size" in options else {}
    recipe = make_recipe(
        {
            **TEXTS,
            "model": {**TEXTS["model"], "config": config},
            "train": {"device": "cpu", "epochs": 1, "lr": 0.01, "batch_size": 8, "optimizer": "SGD", **micro},
            "plugins": [{"text-classification": options}, *plugins],
            "output": output,
        }
    )
    return build(resolve(recipe))
