"""Resolve a recipe: its plugins, from installed packages and files, checked together, in call order."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastloop.distributed.ranks import world_size
from fastloop.errors import FastloopError, PluginError, did_you_mean
from fastloop.plugins import declarations
from fastloop.plugins.installed import check_class, defaults, installed, load
from fastloop.plugins.manager import PluginSet, origin
from fastloop.plugins.order import order
from fastloop.plugins.plugin import Plugin, listed_at
from fastloop.recipe import Recipe
from fastloop.recipe.importing import import_file
from fastloop.recipe.plugin_references import split_file
from fastloop.runtime import hardware


def load_listed(recipe: Recipe, name: str) -> type[Plugin]:
    """Import the class of a plugin that a recipe lists, from an installed package or a file.

    Raises:
        PluginError: See ``load``.
        RecipeError: The file cannot be imported.
    """
    reference = recipe.references.get(name, name)
    key = f"plugins[{list(recipe.plugins).index(name)}]"
    if (parts := split_file(reference)) is None:
        return load(reference, f"{recipe.where}: {key}")
    module = import_file(parts[0], recipe, key)
    own = [
        cls
        for cls in vars(module).values()
        if getattr(cls, "__module__", "") == module.__name__ and getattr(cls, "name", "") == name
    ]
    return check_class(
        getattr(module, parts[1], None) if parts[1] else next(iter(own), None), f"{recipe.where}: {key}: {reference}"
    )


def make(recipe: Recipe, name: str) -> Plugin:
    """Create a plugin that a recipe lists, with its options.

    Raises:
        PluginError: See ``load``; or its constructor fails.
        RecipeError: An option is invalid.
    """
    cls, options = load_listed(recipe, name), recipe.plugins[name] or {}
    try:
        with listed_at(recipe.place(name)):
            return cls(**{str(key): value for key, value in options.items()})
    except FastloopError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"cannot be created: {type(error).__name__}: {error}"
        raise PluginError(f"{recipe.place(name)}: {cls.__qualname__} ({origin(cls)}) {problem}") from error


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe and its plugins: the result of ``resolve``, from which runs are built. A second run needs new plugins:
    resolve again.

    Attributes:
        recipe: A copy of the recipe, with the plugins that others, such as ``auto``, selected. The run writes it into
            its folder.
        plugins: In call order, with reasons.
    """

    recipe: Recipe
    plugins: PluginSet

    def with_extra(self, extra: Iterable[Plugin]) -> ResolvedRecipe:
        """The same recipe with more plugin objects, before all others. They have no reason, and may fill a slot or
        implement a *first* hook that a plugin of the recipe has, too."""
        return ResolvedRecipe(self.recipe, PluginSet([*extra, *self.plugins], self.plugins.reasons))

    def with_only(self, names: Iterable[str]) -> ResolvedRecipe:
        """The same recipe with only these of its plugins, in this order. They are not checked again."""
        plugins = {plugin.name: plugin for plugin in self.plugins}
        return ResolvedRecipe(
            self.recipe, PluginSet([plugins[name] for name in names if name in plugins], self.plugins.reasons)
        )


def resolve(
    recipe: Recipe,
    machine: hardware.Machine | None = None,
    objects: Iterable[Plugin] = (),
    *,
    any_machine: bool = False,
) -> ResolvedRecipe:
    """Load the recipe's plugins, add the defaults, check them together, and order them. The recipe stays as it is.

    Args:
        machine: The machine to check requirements against, and to select plugins for; None: this one.
        objects: Plugin objects from Python, which follow the recipe's plugins.
        any_machine: Whether to skip ``check_requirements``. Then torch is imported only for a recipe with ``auto``,
            without ``machine``.

    Raises:
        PluginError: A plugin is unknown, conflicts with another, or lacks a requirement. Or two plugins fill one slot
            or implement one *first* hook, the ordering constraints are circular, or a numerics class is unknown.
        RecipeError: An option of a plugin is invalid.
    """
    resolved = _collect(expand(recipe, machine), objects)
    if not any_machine:
        check_requirements(resolved, machine)
    return resolved


def check_requirements(resolved: ResolvedRecipe, machine: hardware.Machine | None = None) -> None:
    """Check the requirements of the plugins on a machine; None: this one.

    Raises:
        PluginError: A plugin lacks a requirement.
    """
    where, machine = resolved.recipe.where, machine or hardware.this_machine(resolved.recipe.train.device)
    for plugin in resolved.plugins:
        for need in plugin.requirements:
            if missing := need.missing(plugin, machine):
                raise PluginError(
                    f"{where}: plugin {plugin.name!r} {missing.rstrip('.')}. Or leave it out: --without {plugin.name}."
                )


def expand(recipe: Recipe, machine: hardware.Machine | None = None) -> Recipe:
    """A copy of a recipe, with each plugin that selects others, such as ``auto``, replaced by the ones that it selects
    for the machine.

    The run writes the copy, so its own recipe file does not depend on the machine.
    """
    recipe = Recipe(**{name: copy.copy(value) for name, value in vars(recipe).items()})
    for name, options in list(recipe.plugins.items()):
        if options is False or load_listed(recipe, name).select_plugins is Plugin.select_plugins:
            continue
        plugin, machine = make(recipe, name), machine or hardware.this_machine(recipe.train.device)
        if chosen := plugin.select_plugins(recipe, machine):
            added: dict[str, Any] = {key: dict(found.options) for key, found in chosen.items()}
            entries = (added.items() if key == name else [(key, listed)] for key, listed in recipe.plugins.items())
            recipe.plugins, recipe.selector = dict(itertools.chain.from_iterable(entries)), plugin
            recipe.selected |= {key: f"{name}: {found.why}" for key, found in chosen.items()}
    return recipe


def _collect(recipe: Recipe, objects: Iterable[Plugin]) -> ResolvedRecipe:
    """Make the plugins of an expanded recipe, add the defaults, check them together, and order them."""
    names = {point.name for point in installed().values()}
    left_out = [name for name, options in recipe.plugins.items() if options is False]
    for name in left_out:
        if name not in names and name not in recipe.references:
            raise PluginError(
                f"{recipe.where}: plugins.{name}: no plugin {name!r} is installed.{did_you_mean(name, names)}"
            )
    listed = [name for name in recipe.plugins if name not in left_out]
    plugins = [make(recipe, name) for name in listed if _takes_part(load_listed(recipe, name), recipe)]
    reasons = {plugin.name: recipe.selected.get(plugin.name, "listed in the recipe") for plugin in plugins}
    plugins += (given := list(objects))
    reasons |= {plugin.name: "given in Python" for plugin in given}
    filled = {plugin.slot: plugin.name for plugin in plugins}
    for cls in [point.load() for name, point in defaults().items() if name not in left_out]:
        if same := next((plugin for plugin in plugins if plugin.name == cls.name), None):
            declarations.check_replacement(recipe, same, cls)
        elif cls.name in filled:
            reasons[filled[cls.name]] += f"; replaces {cls.name!r}"
        elif not (cls.slot and cls.slot in filled) and _takes_part(cls, recipe) and (reason := cls.auto_enable(recipe)):
            plugins.append(cls())
            filled[cls.slot] = cls.name
            reasons[cls.name] = f"on by default: {reason}"
    if recipe.inference is None:
        declarations.check_strategy(recipe, plugins, world_size())
    declarations.check_together(plugins, names, recipe.where)
    ordered = order(plugins, reasons)
    declarations.check_exclusive_hooks(ordered, reasons, recipe.where)
    return ResolvedRecipe(recipe, PluginSet(ordered, reasons))


def _takes_part(cls: type[Plugin], recipe: Recipe) -> bool:
    """Whether a plugin of the recipe is in the run. Without training, only the task and plugins that declare
    ``for_inference`` are."""
    return recipe.inference is None or cls.slot == "task" or cls.for_inference
