"""The files with which Sentence Transformers loads an exported model: ``SentenceTransformer(folder)``."""

from __future__ import annotations

import json
from pathlib import Path

from fastloop_embeddings.options import EmbeddingOptions

MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
"""Pooling -> the end of its key in the configuration of the module ``Pooling``."""


def write_modules(folder: Path, size: int, max_length: int, options: EmbeddingOptions) -> None:
    """Write ``modules.json`` and the configurations that it names. Sentence Transformers since 2.3 reads this layout.

    Vectors have ``size`` numbers. ``encode(texts, prompt_name=...)`` reads ``query`` and ``document``.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * options.normalize
    modes = {f"pooling_mode_{end}": how == options.pooling for how, end in MODES.items()}
    prompts = {"query": options.query_prompt, "document": options.document_prompt}
    files = {
        "1_Pooling/config.json": {"word_embedding_dimension": size, **modes},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": prompts, "similarity_fn_name": "cosine"},
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    }
    for path, _ in modules:
        (folder / path).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
