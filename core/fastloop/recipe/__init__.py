"""Recipes: typed settings from YAML files and overrides."""

from fastloop.recipe.paths import anchored, find_recipe, shipped_recipes
from fastloop.recipe.recipe import SECTIONS, Inference, Recipe, Train, load_recipe, make_recipe

__all__ = [
    "SECTIONS",
    "Inference",
    "Recipe",
    "Train",
    "anchored",
    "find_recipe",
    "load_recipe",
    "make_recipe",
    "shipped_recipes",
]
