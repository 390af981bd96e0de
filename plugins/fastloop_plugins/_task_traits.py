"""The traits that the task of a run declares: see ``Plugin.declare_traits``."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from fastloop import Plugin, PluginError, Trait
from fastloop.errors import did_you_mean

if TYPE_CHECKING:
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe

TRAITS: tuple[Trait, ...] = get_args(Trait)
"""All traits."""


def recipe_traits(recipe: Recipe) -> frozenset[Trait]:
    """The traits of the recipe's task: the one that it lists, or the first default one that takes its data.

    Raises:
        PluginError: The task declares a trait that does not exist.
    """
    from fastloop.plugins.installed import defaults
    from fastloop.plugins.resolve import load_listed

    for name, options in recipe.plugins.items():
        if options is False:
            continue
        cls = load_listed(recipe, name)
        if cls.slot == "task":
            return _traits(cls, recipe)
    for name, point in defaults().items():
        if recipe.leaves_out(name):
            continue
        cls = point.load()
        if cls.slot == "task" and cls.auto_enable(recipe) is not None:
            return _traits(cls, recipe)
    return frozenset()


def require_trait(trait: Trait, plugin: Plugin, recipe: Recipe, plugins: PluginSet) -> None:
    """Check that the task of a run declares a trait, for a plugin that cannot act without it.

    Raises:
        PluginError: It does not, or declares a trait that does not exist.
    """
    task = plugins.task
    if task is None or trait not in _traits(type(task), recipe):
        problem = "this run has no task" if task is None else f"the task of this run is {task.name!r}"
        raise PluginError(
            f"plugin {plugin.name!r} requires a task that declares {trait!r}, and {problem}.",
            code="missing-trait",
            place=recipe.where,
            remedy=f"Leave it out: --without {plugin.name}. A task of your own declares it in `declare_traits`.",
        )


def _traits(task: type[Plugin], recipe: Recipe) -> frozenset[Trait]:
    traits = frozenset(task.declare_traits(recipe))
    unknown = sorted(traits - {*TRAITS})
    if unknown:
        raise PluginError(
            f"the task {task.name!r} declares {unknown[0]!r}, expected traits among {', '.join(TRAITS)}.",
            code="invalid-declaration",
            place=recipe.where,
            remedy=did_you_mean(unknown[0], TRAITS),
        )
    return traits
