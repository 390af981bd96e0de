"""Tiny checkpoints of each text task, for tests of new tokens: the texts have ``<call>``, which is not a token yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from text_helpers import TINY, TINY_GPT, make_run

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 1, "max_position_embeddings": 64}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
TEXTS = [f"one two <call> three {'four ' * (i % 3)}five" for i in range(24)]
ROWS = [{"text": text, "label": i % 2, "other": "seven <call> one"} for i, text in enumerate(TEXTS)]
FILES = {"train": "rows.jsonl", "validation": "rows.jsonl"}
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied head": ("causal-lm", TINY_GPT | {"n_positions": 64}, {}),
    "own head": ("causal-lm", LLAMA, {}),
    "classifier": ("text-classification", TINY, {"label": "label"}),
    "tags": ("token-classification", TINY, {"words": "words", "tags": "tags"}),
    "encoder-decoder": ("seq2seq", T5, {"target": "other", "max_target_length": 16}),
    "bias of the head": ("seq2seq", BART, {"target": "other", "max_target_length": 16}),
}
"""Name -> task, configuration of the model and ``data``."""


def write_rows() -> None:
    """Write the rows that all these tasks read."""
    rows = []
    for row in ROWS:
        words = row["text"].split()
        rows.append(row | {"words": words, "tags": ["A" if word == "<call>" else "B" for word in words]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pretrain(kind: str) -> tuple[str, dict[str, Any]]:
    """Write a checkpoint with a vocabulary of its own to the folder ``base``. Returns the task and its ``data``."""
    task, config, data = TASKS[kind]
    data = {"files": FILES, "max_length": 16, **data}
    run = make_run(task, {"config": config, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, data)
    run.hooks.export_model(run=run, folder=Path("base"))
    return task, data


def model_of(run: Any) -> Any:
    return next(plugin.text_model for plugin in run.plugins.plugins if hasattr(plugin, "text_model"))
