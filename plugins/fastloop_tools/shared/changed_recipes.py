"""Recipes with some plugins or values changed, to measure or train them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from fastloop.plugins.installed import defaults
from fastloop.plugins.resolve import ResolvedRecipe, load_listed, resolve
from fastloop.recipe import Recipe, make_recipe


def with_only(recipe: Recipe, names: Iterable[str], **train: Any) -> dict[str, Any]:
    """The recipe as plain values, with only its task and the plugins ``names``, and with keys of ``train`` set.

    Default observers (``read_only``) are off. Default guards stay, so that a variant that does not train its parameters
    is refused.
    """
    tree = copy.deepcopy(recipe.to_dict())
    tree["train"] |= train
    wanted = set(names)
    plugins: dict[str, Any] = {}
    for name, options in recipe.plugins.items():
        if options is not False and (name in wanted or load_listed(recipe, name).slot == "task"):
            plugins[name] = options
    for name, point in defaults().items():
        if name not in plugins and (point.load().read_only or recipe.leaves_out(name)):
            plugins[name] = False
    tree["plugins"] = recipe.listed(plugins)
    return tree


def edited(recipe: Recipe, values: Mapping[str, Any], plugins: Mapping[str, Any]) -> Recipe:
    """The recipe with some values (by dotted key) and plugins (by name; None: not listed) changed.

    Raises:
        UsageError: It cannot run.
    """
    tree = copy.deepcopy(recipe.to_dict())
    for key, value in values.items():
        *parents, last = key.split(".")
        section: Any = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    if plugins:
        listed = {**copy.deepcopy(recipe.plugins), **plugins}
        tree["plugins"] = recipe.listed({name: options for name, options in listed.items() if options is not None})
    made = make_recipe(tree, recipe.source)
    check(made)
    return made


def check(recipe: Recipe) -> ResolvedRecipe:
    """Resolve a recipe and collect the settings of its plugins, which shows contradictions between them.

    Raises:
        UsageError: The recipe cannot run.
    """
    resolved = resolve(recipe)
    resolved.plugins.configure(recipe)
    return resolved
