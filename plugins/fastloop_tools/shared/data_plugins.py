"""Opens a recipe for its data, without the plugins that need a model, for commands that only read data."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop import Plugin, Run
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe


@contextmanager
def open_data(recipe: Recipe, extra: Sequence[Plugin] = (), **train: Any) -> Iterator[Run]:
    """Open a run whose data the block builds as its training does, on the CPU and in a scratch folder.

    Args:
        recipe: An expanded recipe.
        extra: Plugin objects that the command adds.
        train: Keys of ``train`` with values for this purpose.

    Raises:
        RecipeError: The recipe or the data is wrong.
    """
    from fastloop import lifecycle
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    tree = recipe.to_dict()
    tree["train"] |= {"device": "cpu", **train}
    with tempfile.TemporaryDirectory(prefix="fastloop-data-") as scratch:
        resolved = resolve(make_recipe(tree | {"output": f"{scratch}/run"}, recipe.source), any_machine=True)
        with lifecycle.open_data(_with_data_plugins(resolved), extra) as run:
            yield run


def _with_data_plugins(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Keep the task, and the plugin that skips unreadable samples. Other plugins expect the model of the task."""
    skipping = resolved.plugins.configure(resolved.recipe).writers.get("skip_unreadable")
    names = [plugin.name for plugin in resolved.plugins if plugin.slot == "task" or plugin.name == skipping]
    return resolved.with_only(names)
