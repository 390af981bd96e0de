"""Finds the transformers model inside wrappers of plugins and strategies, and the type of a recipe's model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fastloop.recipe import Recipe

BERT_LIKE = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Types of transformers models that classify a text by its first token."""


def transformers_model(model: nn.Module) -> Any:
    """The outermost transformers model in ``model``, whatever wraps it; None if there is none."""
    # its class: peft's wrappers pass the attributes of their model on
    return next((module for module in model.modules() if hasattr(type(module), "set_attn_implementation")), None)


def model_type(recipe: Recipe) -> str | None:
    """The transformers type of the recipe's model: by ``model.config``, by the folder's config.json, or by the hub's
    usual names, such as ``distilbert-base-uncased``. None if that does not show it. Uses no network."""
    config = recipe.model.get("config")
    name = recipe.model.get("name")
    if isinstance(config, dict):
        kind = config.get("model_type")
        return kind if isinstance(kind, str) else None
    if not isinstance(name, str):
        return None
    file = recipe.find(name) / "config.json"
    if file.is_file():
        try:
            kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError, AttributeError):  # the task reports it
            return None
        return kind if isinstance(kind, str) else None
    family = name.rpartition("/")[2].partition("-")[0]
    return {"xlm": "xlm-roberta"}.get(family, family) if family in (*BERT_LIKE, "xlm", "gpt2") else None
