"""The files with which Sentence Transformers loads an exported model: ``SentenceTransformer(folder)``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
"""Pooling -> the end of its key in the configuration of the module ``Pooling``."""


def write_modules(
    folder: Path, size: int, pooling: str, normalized: bool, max_length: int, prompts: Mapping[str, str]
) -> None:
    """Write ``modules.json`` and the configurations that it names. Sentence Transformers since 2.3 reads this layout.

    Vectors have ``size`` numbers, and length 1 if they are ``normalized``. ``pooling`` is a key of ``MODES``.
    ``prompts``: name -> the text that ``encode(..., prompt_name=name)`` puts before each text.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * normalized
    modes = {f"pooling_mode_{end}": how == pooling for how, end in MODES.items()}
    files = {
        "1_Pooling/config.json": {"word_embedding_dimension": size, **modes},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": dict(prompts), "similarity_fn_name": "cosine"},
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    }
    for path, _ in modules:
        (folder / path).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
