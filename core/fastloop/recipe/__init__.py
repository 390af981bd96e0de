"""Recipes: typed settings from YAML files and overrides.

recipe                    # ``load_recipe``: a file, its parents and overrides -> ``Recipe``
safe_yaml, interpolation  # YAML as plain data, and ``${train.lr}``
plugin_references         # how a recipe lists plugins
paths                     # the files that a recipe names, and shipped recipes
references, importing     # code that a recipe names
secrets                   # values that no output may show
"""

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
