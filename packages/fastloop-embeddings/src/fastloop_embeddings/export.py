"""The files with which Sentence Transformers loads an exported model: ``SentenceTransformer(folder)``, or
``CrossEncoder(folder)``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastloop_embeddings.head import Dense, Head
from fastloop_embeddings.modules import CONFIG, OF_SCORES, WEIGHTS, SentenceModules


def write_modules(
    folder: Path, modules: SentenceModules, head: Head, prompts: dict[str, str], hidden_size: int, max_length: int
) -> None:
    """Write ``modules.json``, the files that it names, and prompts. Sentence Transformers since 2.3 reads this layout.

    Args:
        head: The trained weights of the modules Dense.
        prompts: Those of the recipe or the base: ``query`` and ``document``. Other prompts of the base are kept.
        hidden_size: Numbers of a token's vector.
        max_length: Tokens of a text at most.
    """
    from safetensors.torch import save_file

    files: dict[str, Any] = {
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": modules.lowercase},
        CONFIG: {
            "prompts": modules.prompts | prompts,
            "default_prompt_name": modules.default_prompt,
            "similarity_fn_name": modules.similarity,
        },
        "modules.json": [
            {"idx": index, "name": str(index), "path": module.path, "type": module.type}
            for index, module in enumerate(modules.modules)
        ],
    }
    for module in modules.modules[1:]:
        (folder / module.path).mkdir(exist_ok=True)
        if module.config:
            files[f"{module.path}/config.json"] = module.config
    if "embedding_dimension" not in modules.pooling:
        pooling = {"word_embedding_dimension": hidden_size} | modules.pooling
        files[f"{modules.modules[1].path}/config.json"] = pooling
    write_files(folder, files)
    for module, stage in zip(modules.stages, head.stages, strict=True):
        if isinstance(stage, Dense):
            save_file(stage.exported(), folder / module.path / WEIGHTS)


def write_scores(folder: Path, activation: str, max_length: int) -> None:
    """Write the files of a cross-encoder: a Transformer that computes one score, and its activation function.

    Sentence Transformers since 6.0 reads them before ``config.json``, which the folder of an adapter does not have.

    Args:
        activation: The name of the activation function, such as ``torch.nn.modules.activation.Sigmoid``.
        max_length: Tokens of a pair at most.
    """
    transformer: dict[str, Any] = {
        "max_seq_length": max_length,
        "transformer_task": OF_SCORES["transformer_task"],
    }
    if (folder / "adapter_config.json").is_file():  # it brings the head, and that of its base may be for classes
        transformer["config_kwargs"] = {"num_labels": 1}
        transformer["model_kwargs"] = {"ignore_mismatched_sizes": True}
    write_files(
        folder,
        {
            "sentence_bert_config.json": transformer,
            CONFIG: {"model_type": "CrossEncoder", "activation_fn": activation, "prompts": {}},
            "modules.json": [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "",
                    "type": "sentence_transformers.base.modules.transformer.Transformer",
                }
            ],
        },
    )


def write_files(folder: Path, files: dict[str, Any]) -> None:
    """Write JSON files: name -> content."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
