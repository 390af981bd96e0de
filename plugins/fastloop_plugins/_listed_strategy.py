"""Properties of the strategy that a recipe lists. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


def gathers_weights(recipe: Recipe) -> bool:
    """Whether the recipe's strategy gathers sharded weights in each step: see ``Strategy.gathers_weights``."""
    from fastloop.plugins.resolve import load_listed

    for name, options in recipe.plugins.items():
        if options is False:
            continue
        plugin = load_listed(recipe, name)
        if getattr(plugin, "gathers_weights", False):
            return True
    return False
