"""Recipes without the plugins that need a model, for commands that only read data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastloop.plugins.resolve import ResolvedRecipe


def with_data_plugins(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Keep the task, and the plugin that skips unreadable samples. Other plugins expect the model of the task."""
    skipping = resolved.plugins.configure(resolved.recipe).writers.get("skip_unreadable")
    names = [plugin.name for plugin in resolved.plugins if plugin.slot == "task" or plugin.name == skipping]
    return resolved.with_only(names)
