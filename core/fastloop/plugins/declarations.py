"""Check the declarations of a run's plugins when a recipe is resolved. Does not import torch."""

from __future__ import annotations

import functools
import graphlib
import inspect
import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

from fastloop import hookspecs
from fastloop.errors import PluginError, did_you_mean, find_close_match
from fastloop.metric_modes import MetricMode
from fastloop.plugins.hook_checks import implementations
from fastloop.plugins.installed import load
from fastloop.plugins.manager import origin
from fastloop.plugins.order import predecessors, refers
from fastloop.plugins.packages import PLUGINS, suggest_plugin
from fastloop.plugins.plugin import Numerics, Plugin
from fastloop.problem import Problem, join_names
from fastloop.recipe import Recipe
from fastloop.recipe.plugin_references import split_file
from fastloop.strategy import Strategy

log = logging.getLogger("fastloop")

REFERENCES = ("conflicts", "requires", "runs_after", "runs_before")
"""Declarations that name other plugins or ``slot:NAME``."""
CLOSE = 0.8
"""Similarity (see ``find_close_match``) from which an unknown name in a declaration is reported as misspelled. Higher
than the usual 0.6, because the name may be that of an optional plugin that is not installed."""
RESEMBLES = 0.9
"""Similarity from which an attribute of a plugin's class is reported as a misspelled declaration: one letter more, less
or other in ten. Lower values would report attributes of a plugin's own, such as ``published`` and ``required``."""
_DECLARATIONS: dict[str, Any] = {
    name: value for name, value in vars(Plugin).items() if name[0] != "_" and not inspect.isfunction(value)
}
"""Declaration of ``Plugin`` -> its default."""
_MEANT_TYPES: dict[type, Any] = {
    tuple: Collection,
    dict: (tuple, list, set, Mapping),
    type(None): (str, type, ModuleType),
}
"""Type of a declaration's default -> types of the values that an author may have meant for it. For a type that is not
here, it is that type."""


def check_together(plugins: Sequence[Plugin], installed: Collection[str], recipe: Recipe) -> None:
    """Check the declarations of a run's plugins.

    Args:
        installed: Names of the installed plugins.
        recipe: The recipe, for messages.

    Raises:
        PluginError: A declaration is wrong, two plugins exclude each other, a plugin lacks one that it requires, or the
            ordering constraints are circular.
    """
    where = recipe.where
    for plugin in plugins:
        if not plugin.name:
            raise PluginError(
                f"the plugin {type(plugin).__qualname__} has no name.",
                code="unnamed-plugin",
                place=where,
                remedy="Set `name` in its class.",
            )
        check_declarations(plugin, where)
        if sum(other.name == plugin.name for other in plugins) > 1:
            raise PluginError(
                f"plugin {plugin.name!r} appears twice.", code="listed-twice", place=where, remedy="Remove one."
            )
        rivals = [other for other in plugins if plugin.slot and plugin.slot in (other.slot, other.name)]
        if len(rivals) > 1:
            names = _names(rivals)
            fix = _keep_one(rivals)
            raise PluginError(
                f"{names} fill the slot {plugin.slot!r}.", code="slot-filled-twice", place=where, remedy=fix
            )
    for plugin in plugins:
        _check_references(plugin, plugins, {*installed, *(other.name for other in plugins)}, recipe)
    try:
        graphlib.TopologicalSorter(predecessors(plugins)).prepare()
    except graphlib.CycleError as error:
        raise PluginError(_explain_cycle(error.args[1], plugins), code="ordering-cycle", place=where) from None


def check_replacement(recipe: Recipe, plugin: Plugin, cls: type[Plugin]) -> None:
    """Refuse a plugin from a file or from Python with the name of the default plugin ``cls``. ``package:name`` is a
    user's choice.

    Raises:
        PluginError: The plugin is another one.
    """
    listed = plugin.name in recipe.plugins and split_file(recipe.references.get(plugin.name, "")) is None
    if not listed and not isinstance(plugin, cls):
        raise PluginError(
            f"plugin {plugin.name!r} ({origin(type(plugin))}) has the name of a plugin that is on by default, and "
            "would replace it.",
            code="name-taken",
            place=recipe.where,
            remedy=f"Rename it. To leave the other one out, add {{{plugin.name!r}: False}} to the plugins.",
        )


def check_strategy(recipe: Recipe, plugins: Iterable[Plugin], processes: int) -> None:
    """Check that a strategy connects the processes of a run, if it has several.

    Raises:
        PluginError: No plugin fills the slot ``strategy``.
    """
    has_strategy = any(plugin.slot == "strategy" for plugin in plugins)
    if processes > 1 and not has_strategy:
        raise PluginError(
            f"started with {processes} processes, and the recipe leaves out the plugin that joins them: none fills "
            "the slot 'strategy'.",
            code="no-strategy",
            place=recipe.where,
            remedy="List one: `fastloop plugins` shows the plugins of each slot.",
        )


def _names(rivals: Sequence[Plugin]) -> str:
    """The names of plugins of which a run may have one: ``'a', 'b' and 'c'``."""
    return join_names([repr(plugin.name) for plugin in rivals])


def _keep_one(rivals: Sequence[Plugin]) -> str:
    """The remedy for plugins of which a run may have one: ``Keep one: --without b or --without a.``"""
    options = []
    for kept in rivals:
        left_out = [other.name for other in rivals if other is not kept]
        options.append(f"--without {','.join(left_out)}")
    return f"Keep one: {' or '.join(options)}."


def _check_references(plugin: Plugin, plugins: Sequence[Plugin], names: Collection[str], recipe: Recipe) -> None:
    """Check the names of other plugins in a plugin's declarations. Warns about a name that is close to a known one."""
    where = recipe.where
    slots = {other.slot for other in plugins if other.slot}
    for declaration in REFERENCES:
        for reference in getattr(plugin, declaration):
            present = [other for other in plugins if refers([reference], other)]
            if present and declaration == "conflicts":
                raise PluginError(
                    f"plugins {plugin.name!r} and {present[0].name!r} exclude each other: "
                    f"{plugin.conflicts[reference]} Remove one of them.",
                    code="excluded-plugin",
                    place=where,
                )
            if not present and declaration == "requires":
                missing = _explain_missing(plugin, reference, plugins, names, recipe)
                raise PluginError(
                    f"plugin {plugin.name!r} requires {missing.text}",
                    code="missing-plugin",
                    place=where,
                    remedy=missing.remedy,
                )
            if present:
                continue
            meant = nearest(reference, {*names, *PLUGINS}, slots)
            if not meant and ":" not in reference:
                note_once(
                    f"{where}: plugin {plugin.name!r}: {declaration} names {reference!r}, which is no installed plugin."
                )
            if meant not in ("", reference):
                is_slot = reference.startswith("slot:")
                problem = "no plugin of this run is in this slot" if is_slot else "no plugin has this name"
                warn_once(
                    Problem(
                        f"{declaration} names {reference!r}, and {problem}.",
                        code="unknown-plugin",
                        place=f"{where}: plugin {plugin.name!r}",
                        remedy=f"Did you mean {meant!r}?",
                    )
                )


def _explain_cycle(names: list[str], plugins: Sequence[Plugin]) -> str:
    """The declarations that make a cycle, in which each name runs before the next, and one of them to drop."""
    by_name = {plugin.name: plugin for plugin in plugins}
    declarations = []
    for first, second in itertools.pairwise(names):
        for owner, attribute, other in ((second, "runs_after", first), (first, "runs_before", second)):
            for reference in getattr(by_name[owner], attribute):
                if refers([reference], by_name[other]):
                    declarations.append(f"{owner!r} {attribute} {reference!r}")
    return (
        f"the order of plugins is a cycle: {', '.join(declarations)}. Drop one of these declarations, or a "
        f"plugin: --without {names[0]}."
    )


def _explain_missing(
    plugin: Plugin, reference: str, plugins: Sequence[Plugin], names: Collection[str], recipe: Recipe
) -> Problem:
    """The end of the message for a requirement that no plugin of the run meets, and the remedy."""
    slot = reference.removeprefix("slot:")
    if slot != reference:
        return Problem(
            f"a plugin in the slot {slot!r}, which the recipe does not list.",
            remedy="`fastloop plugins` shows who fills it.",
        )
    if reference not in names:
        return Problem(
            f"{reference!r}, and no plugin of this name is installed.", remedy=suggest_plugin(reference, names)
        )
    if load(reference).slot == "task":
        tasks = [repr(other.name) for other in plugins if other.slot == "task"]
        task = tasks[0] if tasks else "none"
        return Problem(
            f"the task {reference!r}, and the task of this run is {task}.",
            remedy="If any task will do, its class requires 'slot:task'.",
        )
    if recipe.leaves_out(reference):
        return Problem(
            f"{reference!r}, which is left out.", remedy=f"Leave out both: --without {reference},{plugin.name}."
        )
    return Problem(f"{reference!r}, which the recipe does not list.", remedy=f"Add it: --with {reference}.")


def nearest(reference: str, names: Collection[str], slots: Collection[str]) -> str:
    """The name or ``slot:NAME`` that a reference is, or is close to; or an empty string."""
    kind, colon, rest = reference.partition(":")
    if not colon:
        return _closest(reference, names)
    if kind == "slot":
        slot = _closest(rest, slots)
        return f"slot:{slot}" if slot else ""
    if rest in slots:  # a misspelled "slot:"
        return f"slot:{rest}"
    return rest if rest in names else ""  # package:name


def _closest(name: str, known: Collection[str]) -> str:
    """The known name that is most similar to a name; empty if none is similar."""
    if name in known:  # most names are, and a comparison with each name takes a millisecond
        return name
    return find_close_match(name, known, CLOSE) or ""


def check_declarations(plugin: Plugin, where: str) -> None:
    """Check that a plugin's class declares what ``Plugin`` knows, and that its ``__init__`` calls that of ``Plugin``.

    Raises:
        PluginError: An attribute of the class resembles a declaration that it lacks, or a declaration has another type.
            Or a strategy overrides one of two methods that belong together.
    """
    where = f"{where}: plugin {plugin.name!r}"
    if plugin.numerics not in get_args(Numerics):
        raise PluginError(
            f"{where} declares the numerics {plugin.numerics!r}, which is no numerics class.",
            code="invalid-declaration",
            remedy=did_you_mean(str(plugin.numerics), get_args(Numerics)),
        )
    if not hasattr(plugin, "_options"):
        raise PluginError(
            "its __init__ does not call super().__init__(**options), which sets its options.",
            code="invalid-declaration",
            place=where,
            remedy="Call it first.",
        )
    for name, default in _DECLARATIONS.items():
        value = getattr(plugin, name)
        wants_tuple = isinstance(default, tuple) and isinstance(value, str | Mapping)
        wants_dict = isinstance(default, dict) and not isinstance(value, Mapping)
        if wants_tuple or wants_dict:
            raise PluginError(
                f"{where} declares {name} = {value!r}, expected a {type(default).__name__}.",
                code="invalid-declaration",
            )
    for metric, mode in plugin.adds_metrics.items():
        if mode is not None and mode not in get_args(MetricMode):
            raise PluginError(
                f"{where} declares adds_metrics with {metric!r}: {mode!r}, expected 'min' if a lower value is better, "
                "'max' if a higher one is, or None.",
                code="invalid-declaration",
            )
    is_strategy = isinstance(plugin, Strategy)
    if (plugin.slot == Strategy.slot) != is_strategy:
        its_class = "a fastloop.Strategy" if is_strategy else "not a fastloop.Strategy"
        raise PluginError(
            f"{where} declares slot = {plugin.slot!r}, and its class is {its_class}. The plugins in the slot "
            "'strategy' are its subclasses.",
            code="invalid-declaration",
        )
    if isinstance(plugin, Strategy):
        _check_gradient_methods(plugin, where)
    _check_misspelled(plugin, where)


def _check_gradient_methods(strategy: Strategy, where: str) -> None:
    """Check that no class of a strategy overrides one of ``gradient_norm`` and ``clip_gradients`` alone.

    Raises:
        PluginError: A class does.
    """
    for cls in type(strategy).__mro__:
        has_norm = "gradient_norm" in vars(cls)
        has_clip = "clip_gradients" in vars(cls)
        if has_norm and has_clip:
            return  # ``Strategy`` itself, at the latest
        if has_norm or has_clip:
            overridden = "gradient_norm" if has_norm else "clip_gradients"
            inherited = "clip_gradients" if has_norm else "gradient_norm"
            raise PluginError(
                f"its class {cls.__qualname__} overrides {overridden} and inherits {inherited}, so the norm that is "
                "logged might not be the norm that is clipped.",
                code="method-not-overridden",
                place=where,
                remedy=f"Override both. If the inherited {inherited} is right, return the result of "
                f"super().{inherited}.",
            )


def _check_misspelled(plugin: Plugin, where: str) -> None:
    """Check that no attribute of a plugin's class is a misspelled declaration, such as ``run_after``.

    Raises:
        PluginError: One resembles a declaration that the class lacks, and has a value of its type.
    """
    own: dict[str, Any] = {}
    for cls in reversed(type(plugin).__mro__):
        if issubclass(cls, Plugin) and cls is not Plugin:
            own |= vars(cls)
    for name, value in own.items():
        if name in _DECLARATIONS:
            continue
        meant = _find_similar(name)
        if meant is None or meant in own:
            continue
        kind = type(_DECLARATIONS[meant])
        if isinstance(value, _MEANT_TYPES.get(kind, kind)):
            raise PluginError(
                f"its class has the attribute {name!r}, which is no declaration of a plugin.",
                code="unknown-declaration",
                place=where,
                remedy=(
                    f"Did you mean {meant!r}? An attribute of your own may have any name that begins with an "
                    "underscore."
                ),
            )


@functools.cache
def _find_similar(name: str) -> str | None:
    """The declaration whose name is similar to this one."""
    for known in _DECLARATIONS:
        if sorted(name) == sorted(known):  # two letters in the wrong order
            return known
    return find_close_match(name, _DECLARATIONS, RESEMBLES)


@functools.cache
def warn_once(problem: Problem) -> None:
    """Log a warning once per process: one command may resolve plugins several times."""
    log.warning(problem)


@functools.cache
def note_once(message: str) -> None:
    """Log a message that is no warning once per process."""
    log.info("%s", message)


# -- *first* hooks -----------------------------------------------------------------------------------------------------


def exclusive_hooks() -> list[str]:
    """The core's *first* hooks that only one plugin of a run may implement."""
    hooks = []
    for name, spec in vars(hookspecs).items():
        is_first = getattr(spec, "fastloop_spec", {}).get("firstresult")
        if is_first and name not in hookspecs.SHARED_FIRST_HOOKS:
            hooks.append(name)
    return hooks


def check_exclusive_hooks(plugins: Sequence[Plugin], reasons: dict[str, str], where: str) -> None:
    """Check that no two plugins implement one *first* hook: only one would be called.

    Args:
        plugins: In call order.
        reasons: Plugin name -> why it is in the run. Updated for plugins that leave a hook to another.

    Raises:
        PluginError: Two plugins do.
    """
    main: dict[str, list[Plugin]] = defaultdict(list)  # hook -> the plugins that implement it
    fallbacks: dict[str, list[Plugin]] = defaultdict(list)  # those that leave it to others
    for plugin in plugins:
        for hook, _, marks in implementations(plugin):
            if marks["wrapper"]:
                continue
            if marks["trylast"] or hook in plugin.fallback_hooks:
                fallbacks[hook].append(plugin)
            else:
                main[hook].append(plugin)
    for hook in exclusive_hooks():
        rivals = main[hook]
        if len(rivals) > 1:
            names = _names(rivals)
            fix = _keep_one(rivals)
            raise PluginError(
                f"plugins {names} both implement {hook}, but only the first would be called. {fix} An author can wrap "
                "the other implementation (@hookimpl(wrapper=True)) or leave the hook to it (fallback_hooks = "
                f'("{hook}",)).',
                code="hook-implemented-twice",
                place=where,
            )
        for plugin in fallbacks[hook]:
            if rivals and plugin.name in reasons:
                reasons[plugin.name] += f"; leaves {hook} to {rivals[0].name!r}"
