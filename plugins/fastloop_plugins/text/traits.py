"""Traits that the text tasks declare by the options of their ``data`` section."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastloop import Trait
    from fastloop.recipe import Recipe


def text_traits(recipe: Recipe) -> set[Trait]:
    """The traits that all text tasks have. ``token-ids`` and ``cached-token-ids`` are of recipes that name
    ``data.text``."""
    traits: set[Trait] = set()
    if "text" in recipe.data:
        traits |= {"token-ids"}
    if not recipe.data.get("streaming"):
        traits |= {"deterministic", "cached-token-ids"} if "text" in recipe.data else {"deterministic"}
    if is_padded_to_maximum(recipe):
        traits |= {"fixed-length"}
    return traits


def is_padded_to_maximum(recipe: Recipe) -> bool:
    """Whether all samples are padded to ``data.max_length``."""
    return recipe.data.get("padding") == "max_length"


def block_traits(recipe: Recipe) -> set[Trait]:
    """The trait of a language model that is trained on blocks of ``data.max_length`` tokens."""
    rows = any(recipe.data.get(key) is not None for key in ("messages", "prompt", "completion"))
    in_blocks = not rows and (not recipe.data.get("streaming") or recipe.data.get("blocks"))
    return {"fixed-length"} if in_blocks else set()
