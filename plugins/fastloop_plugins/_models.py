"""Models as plugins find them: inside wrappers of other plugins and of strategies, or by their name in a recipe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fastloop.recipe import Recipe

BERT_LIKE = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Types of transformers models that classify a text by its first token."""
TEXT_TASKS = ("causal-lm", "seq2seq", "text-classification", "token-classification")
"""Tasks whose datasets and collators are ``deterministic``."""


def transformers_model(model: nn.Module) -> Any:
    """The outermost transformers model in ``model``, whatever wraps it; None if there is none."""
    return next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)


def model_type(recipe: Recipe) -> str | None:
    """The transformers type of the recipe's model: by ``model.config``, by the folder's config.json, or by the hub's
    usual names, such as ``distilbert-base-uncased``. None if that does not show it. Uses no network."""
    config, name = recipe.model.get("config"), recipe.model.get("name")
    if isinstance(config, dict):
        found = config.get("model_type")
        return found if isinstance(found, str) else None
    if not isinstance(name, str):
        return None
    file = recipe.find(name) / "config.json"
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError, AttributeError):  # the task reports it
            return None
        return found if isinstance(found, str) else None
    family = name.rpartition("/")[2].partition("-")[0]
    return {"xlm": "xlm-roberta"}.get(family, family) if family in (*BERT_LIKE, "xlm", "gpt2") else None


def reads_padded_texts(recipe: Recipe) -> bool:
    """Whether the recipe classifies texts or their words, and pads them to the longest of a batch."""
    from fastloop_plugins.tasks._tag_data import has_tags

    classifies = ("text" in recipe.data and recipe.data.get("label") is not None) or has_tags(recipe)
    return classifies and recipe.data.get("padding") != "max_length"


def task_name(recipe: Recipe) -> str | None:
    """The task of the recipe: the one that it lists, or the first default one that takes its data."""
    from fastloop.plugins.installed import defaults
    from fastloop.plugins.resolve import load_listed

    given = (name for name, options in recipe.plugins.items() if options is not False)
    listed = (name for name in given if load_listed(recipe, name).slot == "task")
    classes = (point.load() for name, point in defaults().items() if recipe.plugins.get(name) is not False)
    enabled = (cls.name for cls in classes if cls.slot == "task" and cls.auto_enable(recipe) is not None)
    return next(listed, None) or next(enabled, None)


def has_token_arrays(recipe: Recipe) -> bool:
    """Whether the token ids of all samples are in memory: with the text tasks, unless they stream."""
    return not recipe.data.get("streaming") and task_name(recipe) in TEXT_TASKS


def has_few_shapes(recipe: Recipe) -> bool:
    """Whether batches have few shapes: plugins group or pack texts, or all have ``data.max_length`` tokens."""
    grouped = any(recipe.plugins.get(name, False) is not False for name in ("length-bucketing", "packing"))
    return grouped or recipe.data.get("padding") == "max_length" or has_fixed_blocks(recipe)


def has_fixed_blocks(recipe: Recipe) -> bool:
    """Whether the recipe trains a language model on blocks of ``data.max_length`` tokens."""
    if task_name(recipe) != "causal-lm":
        return False
    rows = any(recipe.data.get(key) is not None for key in ("messages", "prompt", "completion"))
    return not rows and (not recipe.data.get("streaming") or bool(recipe.data.get("blocks")))
