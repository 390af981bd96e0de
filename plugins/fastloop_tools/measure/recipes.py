"""The part of a recipe that a measurement leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastloop.registry import load_listed

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


def without_publishers(recipe: Recipe) -> dict[str, dict[str, Any] | Literal[False]]:
    """Turn off the plugins that send results out of the run folder (``Plugin.publishes``): nobody keeps those of a measurement.

    Returns:
        Name -> False, to update ``recipe.plugins`` with.
    """
    return {name: False for name, options in recipe.plugins.items() if options is not False and load_listed(recipe, name).publishes}
