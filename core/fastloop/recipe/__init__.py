"""Recipes: YAML and overrides to typed values."""

from fastloop.recipe.recipe import SECTIONS, Recipe, Train, anchored, find_recipe, load_recipe, make_recipe, shipped_recipes

__all__ = [
    "SECTIONS",
    "Recipe",
    "Train",
    "anchored",
    "find_recipe",
    "load_recipe",
    "make_recipe",
    "shipped_recipes",
]
