"""Resolve a recipe: its plugins, from installed packages and files, checked together, in call order.

resolve
    expand              # plugins such as `auto` select others
    load and make       # the recipe's plugins, and then the default ones
    check and order     # together: see `declarations` and `order`
    check_requirements  # on this machine
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.distributed.ranks import world_size
from fastloop.errors import FastloopError, PluginError
from fastloop.plugins import declarations
from fastloop.plugins.installed import check_class, defaults, installed, load, unchanged_packages
from fastloop.plugins.manager import PluginSet, origin
from fastloop.plugins.order import order
from fastloop.plugins.packages import PLUGINS, suggest_plugin
from fastloop.plugins.plugin import Plugin, listed_at
from fastloop.problem import typed_clause
from fastloop.recipe import Recipe
from fastloop.recipe.importing import import_file
from fastloop.recipe.plugin_references import split_file
from fastloop.runtime import hardware
from fastloop.speedup_estimates import Recommendation


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
        by_name = {plugin.name: plugin for plugin in self.plugins}
        kept = [by_name[name] for name in names if name in by_name]
        return ResolvedRecipe(self.recipe, PluginSet(kept, self.plugins.reasons))


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
    with unchanged_packages():
        resolved = _collect(expand(recipe, machine), objects)
    if not any_machine:
        check_requirements(resolved, machine)
    return resolved


def check_requirements(resolved: ResolvedRecipe, machine: hardware.Machine | None = None) -> None:
    """Check the requirements of the plugins on a machine; None: this one.

    Raises:
        PluginError: A plugin lacks a requirement.
    """
    recipe = resolved.recipe
    if machine is None:
        machine = hardware.this_machine(recipe.train.device)
    for plugin in resolved.plugins:
        for need in plugin.requirements:
            missing = need.missing(plugin, machine)
            if not missing:
                continue
            # "needs peft, which is not installed. Install it: `pip install peft`."
            problem, _, advice = missing.removesuffix(".").partition(". ")
            remedy = f"Leave it out: `--without {plugin.name}`."
            if advice:
                remedy = f"{advice}. Or leave it out: `--without {plugin.name}`."
            raise PluginError(
                f"plugin {plugin.name!r} {problem}.",
                code="requirement-missing",
                place=recipe.where,
                remedy=remedy,
            )


# -- plugins that select others ----------------------------------------------------------------------------------------


def expand(recipe: Recipe, machine: hardware.Machine | None = None) -> Recipe:
    """A copy of a recipe, with each plugin that selects others, such as ``auto``, replaced by the ones that it selects
    for the machine.

    The run writes the copy, so its own recipe file does not depend on the machine.
    """
    copies = {field.name: copy.copy(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}
    expanded = Recipe(**copies)
    for name, options in recipe.plugins.items():
        if options is False:
            continue
        selects_none = load_listed(expanded, name).select_plugins is Plugin.select_plugins
        if selects_none:
            continue
        if machine is None:
            machine = hardware.this_machine(recipe.train.device)
        selector = make(expanded, name)
        chosen = selector.select_plugins(expanded, machine)
        if not chosen:
            continue
        expanded.plugins = _replace(expanded.plugins, name, chosen)
        expanded.selector = selector
        for selected, recommendation in chosen.items():
            expanded.selected[selected] = f"{name}: {recommendation.why}"
    return expanded


def _replace(
    plugins: Mapping[str, dict[str, Any] | Literal[False]], name: str, chosen: Mapping[str, Recommendation]
) -> dict[str, dict[str, Any] | Literal[False]]:
    """A recipe's plugins with the chosen ones in the place of the plugin ``name``."""
    replaced: dict[str, dict[str, Any] | Literal[False]] = {}
    for listed, options in plugins.items():
        if listed == name:
            for selected, recommendation in chosen.items():
                replaced[selected] = dict(recommendation.options)
        else:
            replaced[listed] = options
    return replaced


# -- the plugins of a recipe -------------------------------------------------------------------------------------------


def load_listed(recipe: Recipe, name: str) -> type[Plugin]:
    """Import the class of a plugin that a recipe lists, from an installed package or a file.

    Raises:
        PluginError: See ``load``.
        RecipeError: The file cannot be imported.
    """
    reference = recipe.references.get(name, name)
    key = f"plugins[{list(recipe.plugins).index(name)}]"
    file_and_class = split_file(reference)
    if file_and_class is None:
        return load(reference, f"{recipe.where}: {key}")
    file, class_name = file_and_class
    module = import_file(file, recipe, key)
    cls = getattr(module, class_name, None) if class_name else _find_class(module, name)
    return check_class(cls, f"{recipe.where}: {key}: {reference}")


def _find_class(module: Any, name: str) -> Any:
    """The first class of a file, not an imported one, that is the plugin ``name``; None: there is none."""
    for cls in vars(module).values():
        if getattr(cls, "__module__", "") == module.__name__ and getattr(cls, "name", "") == name:
            return cls
    return None


def make(recipe: Recipe, name: str) -> Plugin:
    """Create a plugin that a recipe lists, with its options.

    Raises:
        PluginError: See ``load``; or its constructor fails.
        RecipeError: An option is invalid.
    """
    cls = load_listed(recipe, name)
    options = recipe.plugins[name] or {}
    try:
        with listed_at(recipe.place(name)):
            return cls(**{str(key): value for key, value in options.items()})
    except FastloopError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{cls.__qualname__} ({origin(cls)}) cannot be created: {typed_clause(error)}.",
            code="invalid-plugin",
            place=recipe.place(name),
        ) from error


def _collect(recipe: Recipe, objects: Iterable[Plugin]) -> ResolvedRecipe:
    """Make the plugins of an expanded recipe, add the defaults, check them together, and order them."""
    names = {point.name for point in installed().values()}
    _check_left_out(recipe, names)
    plugins: list[Plugin] = []
    reasons: dict[str, str] = {}
    for name, options in recipe.plugins.items():
        if options is not False and _takes_part(load_listed(recipe, name), recipe):
            plugins.append(make(recipe, name))
            reasons[name] = recipe.selected.get(name, "listed in the recipe")
    for plugin in objects:
        plugins.append(plugin)
        reasons[plugin.name] = "given in Python"
    _add_defaults(recipe, plugins, reasons)
    if recipe.inference is None:
        declarations.check_strategy(recipe, plugins, world_size())
    declarations.check_together(plugins, names, recipe)
    ordered = order(plugins, reasons)
    declarations.check_exclusive_hooks(ordered, reasons, recipe.where)
    return ResolvedRecipe(recipe, PluginSet(ordered, reasons))


def _check_left_out(recipe: Recipe, installed_names: Collection[str]) -> None:
    """Check that the plugins exist that a recipe leaves out. Those of a package that is not installed need not.

    Raises:
        PluginError: One does not, so its name is misspelled; suggests the nearest name.
    """
    known = {*installed_names, *recipe.references, *PLUGINS}
    for name, options in recipe.plugins.items():
        if options is False and name not in known:
            suggestion = suggest_plugin(name, installed_names)
            raise PluginError(
                f"no plugin {name!r} is installed.",
                code="unknown-plugin",
                place=f"{recipe.where}: plugins.{name}",
                remedy=suggestion,
            )


def _add_defaults(recipe: Recipe, plugins: list[Plugin], reasons: dict[str, str]) -> None:
    """Add the default plugins that the recipe does not leave out, that apply to it, and whose slot is empty.

    Args:
        plugins: Those of the recipe; gets the default ones.
        reasons: Plugin name -> why it is in the run; gets those of the default ones.

    Raises:
        PluginError: A plugin from a file or from Python has the name of a default plugin.
    """
    fills = {plugin.slot: plugin.name for plugin in plugins if plugin.slot is not None}
    own = {plugin.name: plugin for plugin in plugins}
    for name, point in defaults().items():
        if recipe.leaves_out(name):
            continue
        cls = point.load()
        if name in own:
            declarations.check_replacement(recipe, own[name], cls)
            continue
        if name in fills:
            reasons[fills[name]] += f"; replaces {name!r}"
            continue
        if cls.slot in fills or not _takes_part(cls, recipe):
            continue
        reason = cls.auto_enable(recipe)
        if reason:
            with listed_at(recipe.place(cls.name)):
                plugins.append(cls())
            reasons[name] = f"on by default: {reason}"
            if cls.slot is not None:
                fills[cls.slot] = name


def _takes_part(cls: type[Plugin], recipe: Recipe) -> bool:
    """Whether a plugin of the recipe is in the run. Without training, only the task and plugins that declare
    ``for_inference`` are."""
    return recipe.inference is None or cls.slot == "task" or cls.for_inference
