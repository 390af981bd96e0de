"""Builds the data of a recipe without the plugins that need a model, for commands that only read data."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop import Plugin
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe


def build_data(recipe: Recipe, reader: Plugin, **train: Any) -> ResolvedRecipe:
    """Build the datasets of a recipe as its training does, on the CPU and in a scratch folder.

    Args:
        recipe: An expanded recipe.
        reader: Reads the datasets in its hooks. It has ``build_model``, so that no model of the task is built.
        train: Keys of ``train`` with values for this purpose.

    Returns:
        The recipe as resolved, with all of its plugins.

    Raises:
        RecipeError: The recipe or the data is wrong.
    """
    from fastloop.lifecycle import open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    tree = recipe.to_dict()
    tree["train"] |= {"device": "cpu", **train}
    with tempfile.TemporaryDirectory(prefix="fastloop-data-") as scratch:
        resolved = resolve(make_recipe(tree | {"output": f"{scratch}/run"}, recipe.source), any_machine=True)
        with open_run(_with_data_plugins(resolved), [reader]):
            pass
    return resolved


def _with_data_plugins(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Keep the task, and the plugin that skips unreadable samples. Other plugins expect the model of the task."""
    skipping = resolved.plugins.configure(resolved.recipe).writers.get("skip_unreadable")
    names = [plugin.name for plugin in resolved.plugins if plugin.slot == "task" or plugin.name == skipping]
    return resolved.with_only(names)
