"""Plugins: found by entry point or in a file, loaded when named, checked together, ordered once.

``resolve`` turns a recipe into a ``PluginSet``: the plugin objects in the order in which their hooks are called, and why each is
there. Nothing here knows a plugin by name.
"""

from __future__ import annotations

import heapq
import importlib.metadata
from collections.abc import Collection, Iterable
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fastloop.errors import FastloopError, PluginError, did_you_mean
from fastloop.hooks import PluginSet, origin
from fastloop.options import check_options
from fastloop.plugin import GROUP, Plugin, defaults, entry_points
from fastloop.plugin_checks import check_together
from fastloop.recipe import Recipe
from fastloop.recipe.importing import import_file
from fastloop.recipe.source import split
from fastloop.runtime.hardware import Machine


def installed(group: str = GROUP, taken: Iterable[str] = ()) -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of every installed plugin, from metadata alone: nothing is imported.

    Two distributions that claim one name leave it reachable only as ``distribution:name``.

    Args:
        taken: Names that no distribution can have.
    """
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in entry_points(group):
        found.setdefault(point.name, []).append(point)
    table = {}
    for name, points in sorted(found.items()):
        for point in points:
            table[name if len(points) == 1 and name not in taken else f"{_distribution(point)}:{name}"] = point
    return table


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "?"


def load(reference: str, where: str = "plugins") -> type[Plugin]:
    """The class of an installed plugin: by its name, or as ``package:name``.

    Raises:
        PluginError: No such plugin (with the nearest name), it is made for another fastloop, it does not import, or it is not a plugin.
    """
    point = find(reference, where)
    origin = f"{point.value} of {_distribution(point)} {point.dist.version if point.dist else ''}".rstrip()
    what = f"{where}: plugin {reference!r} ({origin})"
    if unfit := unsupported(point):
        raise PluginError(f"{what} {unfit}")
    try:
        found = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    cls = _checked(found, what)
    if cls.name != point.name:
        raise PluginError(f"{what} calls itself {cls.name!r}. Its `name` and its entry point must be the same.")
    return cls


def find(reference: str, where: str) -> importlib.metadata.EntryPoint:
    """The entry point of an installed plugin; nothing is imported.

    Raises:
        PluginError: There is none, or there are several.
    """
    table = installed()
    package, _, name = reference.rpartition(":")
    if reference in table:
        return table[reference]
    points = [point for point in table.values() if point.name == name]
    if package:
        points = [point for point in points if canonicalize_name(_distribution(point)) == canonicalize_name(package)]
    if len(points) == 1:
        return points[0]
    if points:
        choice = " or ".join(f"{_distribution(point)}:{name}" for point in points)
        raise PluginError(f"{where}: {name!r} is the name of plugins in several packages. Say which: {choice}.")
    raise PluginError(f"{where}: no plugin {reference!r} is installed.{did_you_mean(reference, table)} `fastloop plugins` lists them.")


def unsupported(point: importlib.metadata.EntryPoint) -> str:
    """Why an installed package is not made for this fastloop, by its own Requires-Dist; empty when it is."""
    ours = importlib.metadata.version("fastloop")
    for text in (point.dist.requires if point.dist else None) or ():
        if "fastloop" not in text.lower():  # parsing takes long
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of something else, maybe: installers have read it already
            continue
        if canonicalize_name(requirement.name) != "fastloop" or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        if not requirement.specifier.contains(ours, prereleases=True):
            both = f"pip install -U {_distribution(point)} 'fastloop{requirement.specifier}'"
            return f"is made for fastloop {requirement.specifier}, and this is {ours}. Install versions that fit: {both}"
    return ""


def load_listed(recipe: Recipe, name: str) -> type[Plugin]:
    """The class of a plugin that a recipe lists, by name: of an installed package, or of a file, whose code runs here.

    Raises:
        PluginError: As ``load``.
        RecipeError: The file cannot be imported.
    """
    reference = recipe.references.get(name, name)
    key = f"plugins[{list(recipe.plugins).index(name)}]"
    if (parts := split(reference)) is None:
        return load(reference, f"{recipe.where}: {key}")
    module = import_file(parts[0], recipe, key)
    own = [cls for cls in vars(module).values() if getattr(cls, "__module__", "") == module.__name__ and getattr(cls, "name", "") == name]
    cls = getattr(module, parts[1], None) if parts[1] else next(iter(own), None)
    return _checked(cls, f"{recipe.where}: {key}: {reference}")


def make(recipe: Recipe, name: str) -> Plugin:
    """A plugin that a recipe lists, with the options that it has there.

    Raises:
        PluginError: As ``load``; or its constructor fails.
        RecipeError: An option cannot be.
    """
    cls, options = load_listed(recipe, name), recipe.plugins[name] or {}
    try:
        return cls(_where=recipe.place(name), **{str(key): value for key, value in options.items()})
    except FastloopError:
        raise
    except Exception as error:
        raise PluginError(
            f"{recipe.place(name)}: {cls.__qualname__} ({origin(cls)}) cannot be made: {type(error).__name__}: {error}"
        ) from error


def _checked(cls: Any, what: str) -> type[Plugin]:
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise PluginError(f"{what} is not a subclass of fastloop.Plugin.")
    check_options(cls.Config, f"{what}: its Config")
    return cls


def resolve(recipe: Recipe, machine: Machine | None = None, objects: Iterable[Plugin] = ()) -> PluginSet:
    """Load what the recipe names, add the defaults that it activates, check all together, and order them.

    Args:
        machine: What needs are checked against; None asks torch.
        objects: Plugin objects given in Python, after the recipe's own.

    Raises:
        PluginError: No such plugin, two in one slot, a conflict, something required or needed is missing, a circle of constraints, two
            plugins that answer one hook, an unknown numerics class.
        RecipeError: A plugin's option cannot be.
    """
    resolution = select(recipe, objects)
    machine = machine or _machine(recipe)
    for plugin in resolution.plugins:
        for need in plugin.requirements:
            if missing := need.missing(plugin, machine):
                raise PluginError(
                    f"{recipe.where}: plugin {plugin.name!r} {missing.rstrip('.')}. Or leave it out: --without {plugin.name}."
                )
    return resolution


def select(recipe: Recipe, objects: Iterable[Plugin] = ()) -> PluginSet:
    """``resolve`` without what asks the machine: torch is not loaded."""
    plugins: list[Plugin] = []
    reasons: dict[str, str] = {}
    for name, options in recipe.plugins.items():
        if options is False:
            known = {point.name for point in installed().values()}
            if name not in known and name not in recipe.references:
                raise PluginError(f"{recipe.where}: plugins.{name}: no plugin {name!r} is installed.{did_you_mean(name, known)}")
            continue
        plugins.append(make(recipe, name))
        reasons[plugins[-1].name] = "listed in the recipe"
    for plugin in objects:
        plugins.append(plugin)
        reasons[plugin.name] = "given in Python"
    filled = {plugin.slot for plugin in plugins if plugin.slot}
    for name, point in defaults().items():
        if name in reasons or recipe.plugins.get(name) is False:
            continue
        cls = point.load()
        why = cls.auto_enable(recipe)
        if why and (cls.slot is None or cls.slot not in filled):
            plugins.append(cls())
            filled.add(cls.slot)
            reasons[cls.name] = f"on by default: {why}"
    names = {point.name for point in installed().values()}
    _check(plugins, names, recipe.where)
    ordered = _order(plugins, reasons, recipe.where)
    check_together(ordered, names, reasons, recipe.where)
    return PluginSet(ordered, reasons)


def _machine(recipe: Recipe) -> Machine:
    from fastloop.runtime.hardware import this_machine

    return this_machine(recipe.train.device)


def _matching(reference: str, plugins: list[Plugin]) -> list[Plugin]:
    """The plugins that a declaration means: a name, or ``slot:NAME``."""
    kind, colon, slot = reference.partition(":")
    if colon and kind == "slot":
        return [plugin for plugin in plugins if plugin.slot == slot]
    return [plugin for plugin in plugins if plugin.name == reference]


def _check(plugins: list[Plugin], names: Collection[str], where: str) -> None:
    for index, plugin in enumerate(plugins):
        if not plugin.name:
            raise PluginError(f"{where}: the plugin {type(plugin).__qualname__} has no name. Set `name` in its class.")
        for other in plugins[:index]:
            if other.name == plugin.name:
                raise PluginError(f"{where}: plugin {plugin.name!r} is there twice. Remove one.")
        rivals = [other.name for other in plugins if plugin.slot and other.slot == plugin.slot]
        if len(rivals) > 1:
            *some, last = map(repr, rivals)
            repairs = [f"--without {','.join(name for name in rivals if name != kept)}" for kept in rivals]
            raise PluginError(f"{where}: {', '.join(some)} and {last} fill the slot {plugin.slot!r}. Keep one: {' or '.join(repairs)}.")
    for plugin in plugins:
        for reference, why in plugin.conflicts.items():
            for other in _matching(reference, plugins):
                raise PluginError(f"{where}: plugins {plugin.name!r} and {other.name!r} exclude each other: {why} Remove one of them.")
        for reference in plugin.requires:
            if not _matching(reference, plugins):
                slot = reference.removeprefix("slot:")
                if slot != reference:
                    repair = f"a plugin in the slot {slot!r}, which the recipe does not list. `fastloop plugins` shows who fills it."
                elif reference in names:
                    repair = f"{reference!r}, which the recipe does not list. Add it: --with {reference}."
                else:
                    repair = f"{reference!r}, and no plugin of this name is installed.{did_you_mean(reference, names)}"
                raise PluginError(f"{where}: plugin {plugin.name!r} requires {repair}")


def _order(plugins: list[Plugin], reasons: dict[str, str], where: str) -> list[Plugin]:
    """Recipe order, moved only as far as ``runs_after`` and ``runs_before`` ask (Kahn's algorithm, earliest index first)."""
    place = {plugin.name: index for index, plugin in enumerate(plugins)}
    before: dict[str, set[str]] = {plugin.name: set() for plugin in plugins}
    for plugin in plugins:
        for reference in plugin.runs_after:
            before[plugin.name] |= {other.name for other in _matching(reference, plugins)} - {plugin.name}
        for reference in plugin.runs_before:
            for other in _matching(reference, plugins):
                if other is not plugin:
                    before[other.name].add(plugin.name)
    ready = [index for name, index in place.items() if not before[name]]
    heapq.heapify(ready)
    ordered: list[Plugin] = []
    waiting = {name: set(names) for name, names in before.items() if names}
    while ready:
        plugin = plugins[heapq.heappop(ready)]
        ordered.append(plugin)
        for name in [name for name, names in waiting.items() if plugin.name in names]:
            waiting[name].discard(plugin.name)
            if not waiting[name]:
                del waiting[name]
                heapq.heappush(ready, place[name])
                if place[name] < place[plugin.name]:
                    reasons[name] += f"; moved behind {plugin.name!r}"
    while behind := [name for name in waiting if not any(name in names for names in waiting.values())]:
        for name in behind:  # waits for the circle, and is no part of it
            del waiting[name]
    if waiting:
        raise PluginError(
            f"{where}: the order of plugins {', '.join(map(repr, waiting))} goes round in a circle of runs_after and runs_before."
        )
    return ordered
