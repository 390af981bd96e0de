"""Helpers for commands of other packages. The names in ``__all__`` are public: docs/write-a-plugin.md lists them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop.cli.arguments import choice, output_file
    from fastloop.recipe import make_recipe
    from fastloop.recipe.safe_yaml import load as load_yaml
    from fastloop.runtime.files import write as write_file
    from fastloop_tools.shared.recipe_text import recipe_text

PLACES = {
    "choice": ("fastloop.cli.arguments", "choice"),
    "load_yaml": ("fastloop.recipe.safe_yaml", "load"),
    "make_recipe": ("fastloop.recipe", "make_recipe"),
    "output_file": ("fastloop.cli.arguments", "output_file"),
    "recipe_text": ("fastloop_tools.shared.recipe_text", "recipe_text"),
    "write_file": ("fastloop.runtime.files", "write"),
}
"""Public name -> its module, which is imported at the first use, and its name there."""

__all__ = ["choice", "load_yaml", "make_recipe", "output_file", "recipe_text", "write_file"]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        module, own_name = PLACES[name]
        return getattr(import_module(module), own_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
