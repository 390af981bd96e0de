"""Plugins: found by entry point, loaded when named, checked together, ordered once.

``resolve`` turns a recipe into a ``Resolution``: the plugin objects in the order in which their hooks are called, why each is
there, and the pluggy manager of this one run. Nothing here knows a plugin by name.
"""

from __future__ import annotations

import functools
import heapq
import importlib.metadata
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pluggy

from fastloop import hookspecs
from fastloop.errors import FastloopError, PluginCrash, PluginError, did_you_mean
from fastloop.machine import Machine
from fastloop.plugin import Plugin
from fastloop.recipe import Recipe
from fastloop.state import Draft

GROUP = "fastloop.plugins"
DEFAULTS = "fastloop.defaults"
"""Plugins that fastloop's own distribution turns on by itself. Other distributions' entries are not read: installed is not active."""

_SPECS: dict[str, list[str]] = {
    name: list(inspect.signature(spec).parameters) for name, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")
}


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of every installed plugin, from metadata alone: nothing is imported.

    Two distributions that claim one name leave it reachable only as ``distribution:name``.
    """
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    table = {}
    for name, points in sorted(found.items()):
        for point in points:
            table[name if len(points) == 1 else f"{_distribution(point)}:{name}"] = point
    return table


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "?"


def load(name: str, where: str = "plugins") -> type[Plugin]:
    """The class of an installed plugin.

    Raises:
        PluginError: No such plugin (with the nearest name), it does not import, or it is not a plugin.
    """
    table = installed()
    rivals = [key for key in table if key.endswith(f":{name}")]
    if name not in table and len(rivals) > 1:
        raise PluginError(f"{where}: {name!r} is the name of plugins in several packages. Say which: {' or '.join(rivals)}.")
    if name not in table:
        raise PluginError(f"{where}: no plugin {name!r} is installed.{did_you_mean(name, table)} `fastloop plugins` lists them.")
    point = table[name]
    origin = f"{point.value} of {_distribution(point)} {point.dist.version if point.dist else ''}".rstrip()
    try:
        cls = point.load()
    except Exception as error:
        raise PluginError(f"{where}: plugin {name!r} ({origin}) cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise PluginError(f"{where}: plugin {name!r} ({origin}) is not a subclass of fastloop.Plugin.")
    if cls.name != point.name:
        raise PluginError(
            f"{where}: plugin {name!r} ({origin}) calls itself {cls.name!r}. Its `name` and its entry point must be the same."
        )
    return cls


def _check_hooks(plugin: Plugin) -> None:
    """Every hook of a plugin must be one, and take arguments that it gets."""
    for attribute in dir(type(plugin)):
        method = getattr(plugin, attribute)
        marks = getattr(method, "fastloop_impl", None)
        if marks is None:
            continue
        hook = marks["specname"] or attribute
        where = f"plugin {plugin.name!r}: {hook}"
        if hook not in _SPECS:
            raise PluginError(f"plugin {plugin.name!r}: there is no hook {hook!r}.{did_you_mean(hook, _SPECS)}")
        if hook in hookspecs.ONE_BY_ONE and (marks["wrapper"] or marks["hookwrapper"]):
            raise PluginError(f"{where} cannot be a wrapper: it is called on each plugin by itself.")
        for parameter in inspect.signature(method).parameters.values():
            known = parameter.name in _SPECS[hook]
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (
                parameter.default is not parameter.empty and not known
            ):
                continue
            if not known:
                raise PluginError(f"{where} gets no argument {parameter.name!r}.{did_you_mean(parameter.name, _SPECS[hook])}")
            if parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY:
                raise PluginError(
                    f"{where}: the argument {parameter.name!r} must be positional and without a default, else it is not passed."
                )


@dataclass
class Resolution:
    """The plugins of one run.

    Attributes:
        plugins: In the order in which their hooks are called.
        reasons: Plugin name -> why it is there, and what moved it.
    """

    plugins: list[Plugin]
    reasons: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Plugin names in call order."""
        return [plugin.name for plugin in self.plugins]

    @cached_property
    def manager(self) -> pluggy.PluginManager:
        """pluggy's manager with exactly these plugins, and the core's own answers as the last to be asked."""
        from fastloop import defaults

        manager = pluggy.PluginManager("fastloop")
        manager.add_hookspecs(hookspecs)
        manager.register(defaults, "fastloop")
        for plugin in reversed(self.plugins):  # pluggy calls the last registered first
            _check_hooks(plugin)
            try:
                manager.register(plugin, plugin.name)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"plugin {plugin.name!r}: {error}") from None
        return manager

    @property
    def hooks(self) -> Any:
        """Call a hook on all plugins: ``hooks.after_step(run=run, loss=loss)``."""
        return self.manager.hook

    def each(self, hook: str) -> Iterator[tuple[Plugin, Callable[..., Any]]]:
        """Every plugin that implements a hook with its own bound method, in call order."""
        for impl in reversed(getattr(self.hooks, hook).get_hookimpls()):
            if isinstance(impl.plugin, Plugin):
                yield impl.plugin, lambda _impl=impl, **arguments: _impl.function(*(arguments[name] for name in _impl.argnames))

    def draft(self, hook: str, draft: Draft) -> Any:
        """Have every plugin fill in a draft; returns it."""
        for plugin, call in self.each(hook):
            draft.__dict__["_writer"] = plugin.name
            call(draft=draft)
        return draft

    def chain(self, hook: str, model: Any, **arguments: Any) -> Any:
        """Pass the model through every plugin; a result that is not None replaces it."""
        for _, call in self.each(hook):
            replacement = call(model=model, **arguments)
            model = model if replacement is None else replacement
        return model

    def environment(self, recipe: Recipe) -> dict[str, str]:
        """What plugins want the process to have from its start.

        Raises:
            PluginError: Two plugins want different values.
        """
        wanted: dict[str, tuple[str, str]] = {}
        for plugin, call in self.each("environment"):
            for name, value in (call(recipe=recipe) or {}).items():
                other, before = wanted.setdefault(name, (plugin.name, value))
                if before != value:
                    raise PluginError(
                        f"{recipe.where}: plugins {plugin.name!r} and {other!r} want different values of {name}: {value!r} and {before!r}. "
                        "Remove one of them."
                    )
        return {name: value for name, (_, value) in wanted.items()}

    @contextmanager
    def around(self, span: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """While inside, each call of a plugin's hook is within ``span("NAME.hook")``. Wrappers, which others run inside of, are not."""

        def within(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            @functools.wraps(function)
            def called(*arguments: Any) -> Any:
                with span(name):
                    return function(*arguments)

            return called

        changed = []
        for hook in _SPECS:
            for impl in getattr(self.hooks, hook).get_hookimpls():
                if isinstance(impl.plugin, Plugin) and not (impl.wrapper or impl.hookwrapper):
                    changed.append((impl, impl.function))
                    impl.function = within(impl.function, f"{impl.plugin.name}.{hook}")
        try:
            yield
        finally:
            for impl, function in changed:
                impl.function = function

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """An error that comes out of a plugin's hook inside is raised as one that names both.

        Raises:
            PluginCrash: With the error as its cause. Errors for the user go through as they are, and so do those of the core.
        """
        try:
            yield
        except FastloopError:
            raise
        except Exception as error:
            if crash := self.blame(error):
                raise crash from error
            raise

    def blame(self, error: BaseException) -> PluginCrash | None:
        """The plugin and hook an exception came out of, by the frames of its traceback; None when it was not in one."""
        owners: dict[Any, list[tuple[Plugin, str]]] = {}
        for name in _SPECS:
            for impl in getattr(self.hooks, name).get_hookimpls():
                if isinstance(impl.plugin, Plugin):  # unwrapped, since every function under torch.no_grad() has the decorator's code
                    code = getattr(inspect.unwrap(impl.function), "__code__", None)
                    owners.setdefault(code, []).append((impl.plugin, name))
        guilty = None
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for index, frame in enumerate(frames):
            candidates = owners.get(frame.f_code)
            if candidates is None or frames[index - 1] in frames[index + 1 :]:
                continue  # its caller comes again: a wrapper, through which an error from within passed
            this = frame.f_locals.get("self")  # two plugins may inherit one hook
            guilty = next((candidate for candidate in candidates if candidate[0] is this), candidates[0])
        if guilty is None:
            return None
        plugin, hook = guilty
        value = f"{type(plugin).__module__}:{type(plugin).__qualname__}"
        point = next((point for point in installed().values() if point.value == value), None)
        origin = f"{point.dist.name} {point.dist.version}" if point and point.dist else type(plugin).__module__
        crash = PluginCrash(f"plugin {plugin.name!r} ({origin}) failed in {hook}: {type(error).__name__}: {error}")
        crash.__cause__ = error
        return crash


def resolve(recipe: Recipe, machine: Machine | None = None, objects: Iterable[Plugin] = ()) -> Resolution:
    """Load what the recipe names, add the defaults that it activates, check all together, and order them.

    Args:
        machine: What needs are checked against; None asks torch.
        objects: Plugin objects given in Python, after the recipe's own.

    Raises:
        PluginError: No such plugin, two in one slot, a conflict, something required or needed is missing, a circle of constraints.
        RecipeError: A plugin's option cannot be.
    """
    resolution = select(recipe, objects)
    machine = machine or _machine(recipe)
    for plugin in resolution.plugins:
        for need in plugin.needs:
            if missing := need.missing(plugin, machine):
                raise PluginError(
                    f"{recipe.where}: plugin {plugin.name!r} {missing.rstrip('.')}. Or leave it out: --without {plugin.name}."
                )
    return resolution


def select(recipe: Recipe, objects: Iterable[Plugin] = ()) -> Resolution:
    """``resolve`` without what asks the machine: torch is not loaded."""
    plugins, reasons = [], {}
    for index, (name, options) in enumerate(recipe.plugins.items()):
        if options is False:
            if name not in installed():
                raise PluginError(f"{recipe.where}: plugins.{name}: no plugin {name!r} is installed.{did_you_mean(name, installed())}")
            continue
        cls = load(name, f"{recipe.where}: plugins[{index}]")
        plugins.append(cls(_where=f"{recipe.where}: plugins.{name}", **{str(key): value for key, value in options.items()}))
        reasons[cls.name] = "listed in the recipe"
    for plugin in objects:
        plugins.append(plugin)
        reasons[plugin.name] = "given in Python"
    filled = {plugin.slot for plugin in plugins if plugin.slot}
    for point in sorted(importlib.metadata.entry_points(group=DEFAULTS), key=lambda point: point.name):
        if _distribution(point) != "fastloop" or point.name in reasons or recipe.plugins.get(point.name) is False:
            continue
        cls = point.load()
        why = cls.activates(recipe)
        if why and (cls.slot is None or cls.slot not in filled):
            plugins.append(cls())
            filled.add(cls.slot)
            reasons[cls.name] = f"on by default: {why}"
    _check(plugins, recipe.where)
    ordered = _order(plugins, reasons, recipe.where)
    return Resolution(ordered, reasons)


def _machine(recipe: Recipe) -> Machine:
    from fastloop.machine import this_machine

    return this_machine(recipe.train.device)


def _matching(reference: str, plugins: list[Plugin]) -> list[Plugin]:
    """The plugins that a declaration means: a name, or ``slot:NAME``."""
    kind, colon, slot = reference.partition(":")
    if colon and kind == "slot":
        return [plugin for plugin in plugins if plugin.slot == slot]
    return [plugin for plugin in plugins if plugin.name == reference]


def _check(plugins: list[Plugin], where: str) -> None:
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
                repair = (
                    f"{reference!r}, which the recipe does not list. Add it: --with {reference}."
                    if slot == reference
                    else f"a plugin in the slot {slot!r}, which the recipe does not list. `fastloop plugins` shows who fills it."
                )
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
