"""The files whose code a recipe runs, which ``fastloop plan`` lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastloop.recipe import Recipe
from fastloop.recipe.plugin_references import split_file


def code_files(recipe: Recipe) -> list[Path]:
    """The Python files that a run of the recipe executes: plugins, and references in ``model``, ``data`` or an
    option."""

    def references(value: Any) -> Iterator[Path]:
        if isinstance(value, Mapping | list):
            for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
                yield from references(item)
        elif isinstance(value, str):
            parts = split_file(value)
            if parts is not None and recipe.find(parts[0]).is_file():
                yield recipe.find(parts[0]).resolve()

    listed = {
        recipe.references.get(name, name): options for name, options in recipe.plugins.items() if options is not False
    }
    return list(
        dict.fromkeys(references([*listed, *listed.values(), recipe.model, recipe.data, recipe.train.optimizer]))
    )
