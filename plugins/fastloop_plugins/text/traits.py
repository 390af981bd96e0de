"""Traits that the text tasks declare by the options of their ``data`` section."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastloop import Trait
    from fastloop.recipe import Recipe


def text_traits(recipe: Recipe) -> set[Trait]:
    """The traits that all text tasks have: ``token-ids``, and without ``data.streaming`` also ``deterministic`` and
    ``cached-token-ids``. With ``data.padding: max_length`` also ``fixed-length``."""
    traits: set[Trait] = {"token-ids"}
    if not recipe.data.get("streaming"):
        traits |= {"deterministic", "cached-token-ids"}
    return traits | {"fixed-length"} if is_padded_to_maximum(recipe) else traits


def padded_traits(recipe: Recipe) -> set[Trait]:
    """``text_traits``, and ``padded`` where a batch is padded to its longest text."""
    traits = text_traits(recipe)
    return traits if is_padded_to_maximum(recipe) else traits | {"padded"}


def is_padded_to_maximum(recipe: Recipe) -> bool:
    """Whether all samples are padded to ``data.max_length``."""
    return recipe.data.get("padding") == "max_length"


def language_traits(recipe: Recipe) -> set[Trait]:
    """The traits of a causal language model. Blocks of ``data.max_length`` tokens have a fixed length, and
    conversations are padded."""
    rows = any(recipe.data.get(key) is not None for key in ("messages", "prompt", "completion"))
    if not rows and (not recipe.data.get("streaming") or recipe.data.get("blocks")):
        return text_traits(recipe) | {"next-token-loss", "fixed-length"}
    return padded_traits(recipe) | {"next-token-loss"}
