"""Folders as Sentence Transformers writes them, made from an exported model by hand: the tests need no such package."""

import json
import shutil

import torch
from fastloop.testing import TEXTS, with_dropout
from safetensors.torch import save_file
from text_runs import write_recipe

SIZE = 16
"""Numbers of a token's vector."""
OLD = "sentence_transformers.models"
NEW = "sentence_transformers.sentence_transformer.modules"
IDENTITY = "torch.nn.modules.linear.Identity"
LEGACY = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
LENGTH = 24


def legacy(mode):
    """The configuration of a pooling before version 5.5."""
    modes = {f"pooling_mode_{name}": name == mode for name in LEGACY}
    return {"word_embedding_dimension": SIZE, **modes, "include_prompt": True}


def current(*modes):
    return {"embedding_dimension": SIZE, "pooling_mode": modes[0] if len(modes) == 1 else list(modes)}


def dense(inputs, outputs, **config):
    return {"in_features": inputs, "out_features": outputs, "bias": True, **config}


def train_model(folder):
    """The command that trains a tiny model without dropout, and the folder of its export."""
    write_recipe(folder, {}, {}, model=with_dropout(TEXTS, 0.0)["model"], epochs=1)
    return [str(folder), "train", "recipe.yaml"], folder / "run" / "model"


def write_base(model, folder, pooling, stages=(), prompts=None, package=OLD, transformer=None, weights=True):
    """Write a Sentence Transformers folder.

    Args:
        model: The folder of a transformers model.
        pooling: The configuration of its pooling.
        stages: Configuration of each later module: ``None`` for Normalize, a dict for Dense.
        prompts: ``config_sentence_transformers.json``.
        package: The package that ``modules.json`` names.
        transformer: More of ``sentence_bert_config.json``.
        weights: Whether modules Dense have their weights.
    """
    shutil.copytree(model, folder)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("1_Pooling", "2_Normalize"):
        shutil.rmtree(folder / name, ignore_errors=True)
    kinds = ["Transformer", "Pooling", *("Normalize" if stage is None else "Dense" for stage in stages)]
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds[1:], 1))]
    entries = [
        {"idx": place, "name": str(place), "path": path, "type": f"{package}.{kind}"}
        for place, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", entries)
    options = {"max_seq_length": LENGTH, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", options | (transformer or {}))
    if prompts is not None:
        write_json(folder / "config_sentence_transformers.json", prompts)
    for path, config in zip(paths[1:], [pooling, *stages], strict=True):
        (folder / path).mkdir()
        if config is None:
            continue
        write_json(folder / path / "config.json", config)
        if "out_features" in config and weights:
            generator = torch.Generator().manual_seed(len(path))
            shape = (config["out_features"], config["in_features"])
            tensors = {"linear.weight": torch.randn(shape, generator=generator) / 4}
            if config.get("bias", True):
                tensors["linear.bias"] = torch.randn(shape[0], generator=generator) / 4
            save_file(tensors, folder / path / "model.safetensors")


def write_json(path, content):
    path.write_text(json.dumps(content))
