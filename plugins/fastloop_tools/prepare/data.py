"""Builds the datasets of a recipe in the cache of token ids, and no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop import UsageError
from fastloop.lifecycle import build_datasets
from fastloop_plugins._cache import Entry, tokens_kept_in
from fastloop_plugins.data.token_cache import TokenCache, open_token_folder
from fastloop_tools.shared.data_plugins import open_data

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


@dataclass
class PreparedData:
    """Token ids that are on the disk.

    Attributes:
        folder: The folder of ``token-cache``.
        entries: Its entries for the recipe: those of token ids.
        is_selected: Whether the recipe has the plugin, and so trains on them.
    """

    folder: Path
    entries: list[Entry]
    is_selected: bool


def prepare_data(recipe: Recipe) -> PreparedData:
    """Tokenize the data of an expanded recipe, or find its token ids in the cache.

    Raises:
        RecipeError: The recipe or the data is wrong.
        UsageError: The task keeps no token ids.
    """
    if recipe.data.get("streaming"):
        raise UsageError(
            "the training files are read while training, so there is nothing to prepare.",
            code="nothing-to-prepare",
            place=f"{recipe.where}: data.streaming",
            remedy="Give data.streaming=false: then their token ids are mapped from the disk, too.",
        )
    options = recipe.plugins.get(TokenCache.name)
    is_selected = isinstance(options, dict)
    option = options.get("folder", "auto") if isinstance(options, dict) else "auto"
    folder = open_token_folder(str(option), recipe.where)
    with (
        open_data(recipe, max_steps=None) as run,  # a run of few steps needs few rows
        tokens_kept_in(folder) as tokens,
    ):
        task = run.plugins.in_slot("task")
        build_datasets(run)
    if not tokens.entries:
        raise UsageError(
            f"the task {task!r} keeps no token ids. prepare is for tasks with the trait "
            "'cached-token-ids', without model.trust_remote_code.",
            code="unsupported-task",
            place=recipe.where,
        )
    return PreparedData(folder, tokens.entries, is_selected)
