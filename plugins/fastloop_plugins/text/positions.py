"""The tokens that a model takes at most, compared with ``data.max_length``: in `fastloop plan`, too, before the model's
tokenizer is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop.runtime.files import read_json_object
from fastloop_plugins.models.hub import config_from_scratch, quiet
from fastloop_plugins.text.options import DataOptions

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

KEYS = ("max_position_embeddings", "n_positions")
"""Keys of a configuration that may limit the positions. Only the class of the configuration knows whether they do."""


def check_length(recipe: Recipe, max_length: int, config: Any, tokenizer_length: Any, model: str) -> None:
    """Raise an error for a ``data.max_length`` that a model or its tokenizer does not take.

    Args:
        config: The model's configuration of transformers; None: it is not known.
        tokenizer_length: ``model_max_length`` of the tokenizer; None: it states none.
        model: The model, for messages.
    """
    sizes = [getattr(config, "max_position_embeddings", None), tokenizer_length]
    limit = min((size for size in sizes if isinstance(size, int) and size > 0), default=max_length)
    if max_length > limit:
        taken = f"{model} takes {limit} tokens at most"
        raise RecipeError(
            f"found {max_length}, and {taken}.", code="out-of-range", place=f"{recipe.where}: data.max_length"
        )


def check_known_length(
    recipe: Recipe,
    config: Mapping[str, Any] | None,
    name: str | None,
    tokenizer: str | Mapping[str, Any] | None,
    where: str,
) -> None:
    """``check_length`` of a model from scratch or in a local folder. ``TextModel.load_tokenizer`` checks a model of the
    hub, and reports files that cannot be read.

    Args:
        config: ``model.config``; None: the model has a name.
        name: ``model.name``.
        tokenizer: ``model.tokenizer``: a name, or what a tokenizer is trained by. None: the model's own.
        where: The ``model`` section, for messages.
    """
    max_length = recipe.data.get("max_length", DataOptions.max_length)
    if not isinstance(max_length, int):
        return
    folder = None if name is None else recipe.find(name)
    saved = config if config is not None else _read(folder, "config.json")
    sizes = [saved[key] for key in KEYS if isinstance(saved.get(key), int)]
    model_config = None
    if saved and (not sizes or max_length > min(sizes)):  # else transformers, which is slow to import, is not needed
        if config is not None:
            model_config = config_from_scratch(dict(config), f"{where}.config")
        else:
            model_config = _saved_config(folder)
    source = recipe.find(tokenizer) if isinstance(tokenizer, str) else folder
    tokenizer_length = _read(source, "tokenizer_config.json").get("model_max_length")
    check_length(recipe, max_length, model_config, tokenizer_length, name or "the model")


def _saved_config(folder: Path | None) -> Any:
    """The configuration of a local model; None: it cannot be read without the model's own code."""
    from transformers import AutoConfig

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), quiet():
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return None


def _read(folder: Path | None, name: str) -> Mapping[str, Any]:
    """The JSON object of a file in a folder; empty if it cannot be read."""
    if folder is None:
        return {}
    return read_json_object(folder / name)
