"""Recipes: typed settings from YAML files and overrides.

recipe                    # ``Recipe``, and the keys of its section ``train``
other_names               # settings of other trainers, for messages
loading                   # ``load_recipe``: a file, the recipes that it ``extends``, and the command line -> ``Recipe``
overrides, interpolation  # ``train.lr=1e-4`` of a command line, and ``${train.lr}``
safe_yaml                 # YAML as plain data
plugin_references         # how a recipe lists plugins
paths                     # the files that a recipe names, and shipped recipes
references, importing     # code that a recipe names
secrets                   # values that no output may show
"""

from fastloop.recipe.loading import load_recipe, make_recipe
from fastloop.recipe.paths import anchored, find_recipe, shipped_recipes
from fastloop.recipe.recipe import SECTIONS, Inference, Recipe, Train

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
