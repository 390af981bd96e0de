"""Check plugins' declarations when a recipe is resolved, and their hooks when a run registers them.

The core finds this module by its entry point: every run has it, and no recipe names it. Does not import torch.
"""

from __future__ import annotations

import difflib
import functools
import graphlib
import importlib.metadata
import inspect
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

from fastloop import hookspecs
from fastloop.errors import PluginError, did_you_mean
from fastloop.metric_modes import MetricMode
from fastloop.plugins.installed import DISTRIBUTION, distribution_name, is_own, load
from fastloop.plugins.manager import origin
from fastloop.plugins.plugin import Numerics, Plugin
from fastloop.plugins.resolve import predecessors, refers
from fastloop.recipe import Recipe
from fastloop.recipe.plugin_references import split_file
from fastloop.settings import Settings
from fastloop.strategy import METHODS, Strategy

log = logging.getLogger("fastloop")

REFERENCES = ("conflicts", "requires", "runs_after", "runs_before")
"""Declarations that name other plugins or ``slot:NAME``."""
CLOSE = 0.8
"""Similarity (difflib's ratio, in [0, 1]) from which an unknown name in a declaration is reported as misspelled. Higher
than difflib's 0.6, because the name may be that of an optional plugin that is not installed."""
RESEMBLES = 0.9
"""Similarity from which an attribute of a plugin's class is reported as a misspelled declaration: one letter more, less
or other in ten. Lower values would report attributes of a plugin's own, such as ``published`` and ``required``."""
_DECLARED: dict[str, Any] = {
    name: value for name, value in vars(Plugin).items() if name[0] != "_" and not inspect.isfunction(value)
}
_LIKE: dict[type, Any] = {tuple: Collection, dict: (tuple, list, set, Mapping), type(None): (str, type, ModuleType)}
"""Type of a declaration's default -> types of the values that an author may have meant for it; for other declarations:
the type itself."""


def exclusive_hooks() -> list[str]:
    """The core's *first* hooks that only one plugin of a run may implement."""
    return [
        name
        for name, spec in vars(hookspecs).items()
        if getattr(spec, "fastloop_spec", {}).get("firstresult") and name not in hookspecs.SHARED_FIRST_HOOKS
    ]


def implementations(plugin: Plugin) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """``(hook, method, marks of @hookimpl)`` for each hook that a plugin implements."""
    for attribute in dir(type(plugin)):
        method = getattr(plugin, attribute)
        marks = getattr(method, "fastloop_impl", None)
        if marks is not None:
            yield marks["specname"] or attribute, method, marks


# -- plugins of a run --------------------------------------------------------------------------------------------------


def check_together(plugins: Sequence[Plugin], installed: Collection[str], where: str) -> None:
    """Check the declarations of a run's plugins.

    Args:
        installed: Names of the installed plugins.
        where: The recipe, for messages.

    Raises:
        PluginError: A declaration is wrong, two plugins exclude each other, a plugin lacks one that it requires, or the
            ordering constraints are circular.
    """
    for plugin in plugins:
        if not plugin.name:
            raise PluginError(f"{where}: the plugin {type(plugin).__qualname__} has no name. Set `name` in its class.")
        check_declarations(plugin, where)
        if sum(other.name == plugin.name for other in plugins) > 1:
            raise PluginError(f"{where}: plugin {plugin.name!r} appears twice. Remove one.")
        rivals = [other for other in plugins if plugin.slot and plugin.slot in (other.slot, other.name)]
        if len(rivals) > 1:
            names, fix = _keep_one(rivals)
            raise PluginError(f"{where}: {names} fill the slot {plugin.slot!r}. {fix}")
    for plugin in plugins:
        _check_references(plugin, plugins, {*installed, *(other.name for other in plugins)}, where)
    try:
        graphlib.TopologicalSorter(predecessors(plugins)).prepare()
    except graphlib.CycleError as error:
        raise PluginError(f"{where}: {_explain_cycle(error.args[1], plugins)}") from None


def check_replacement(recipe: Recipe, plugin: Plugin, cls: type[Plugin]) -> None:
    """Refuse a plugin from a file or from Python with the name of the default plugin ``cls``. ``package:name`` is a
    user's choice.

    Raises:
        PluginError: The plugin is another one.
    """
    listed = plugin.name in recipe.plugins and split_file(recipe.references.get(plugin.name, "")) is None
    if not listed and not isinstance(plugin, cls):
        raise PluginError(
            f"{recipe.where}: plugin {plugin.name!r} ({origin(type(plugin))}) has the name of a plugin that is on by "
            "default, "
            f"and would replace it. Rename it. To leave the other one out, add {{{plugin.name!r}: False}} to the "
            "plugins."
        )


def check_strategy(recipe: Recipe, plugins: Iterable[Plugin], processes: int) -> None:
    """Check that a strategy connects the processes of a run, if it has several.

    Raises:
        PluginError: No plugin fills the slot ``strategy``.
    """
    has_strategy = any(plugin.slot == "strategy" for plugin in plugins)
    if processes > 1 and not has_strategy:
        raise PluginError(
            f"{recipe.where}: started with {processes} processes, and the recipe leaves out the plugin that joins "
            "them: none fills the slot 'strategy'. List one: `fastloop plugins` shows the plugins of each slot."
        )


def check_groups(recipe: Recipe, settings: Settings, processes: int) -> None:
    """Check that the processes of a run form whole groups of ``settings.processes_per_batch``.

    Raises:
        PluginError: They do not.
    """
    size = settings.processes_per_batch
    if 0 < size < processes and processes % size:
        raise PluginError(
            f"{recipe.where}: plugin {settings.writers['processes_per_batch']!r} needs groups of {size} "
            f"processes, and {processes} are not a multiple of {size}. Start "
            f"{processes // size * size} or {(processes // size + 1) * size}."
        )


def _keep_one(rivals: Sequence[Plugin]) -> tuple[str, str]:
    """Names of plugins of which a run may have one, and the options that leave out the others."""
    *others, last = (repr(plugin.name) for plugin in rivals)
    fixes = [f"--without {','.join(other.name for other in rivals if other is not kept)}" for kept in rivals]
    return f"{', '.join(others)} and {last}", f"Keep one: {' or '.join(fixes)}."


def _check_references(plugin: Plugin, plugins: Sequence[Plugin], names: Collection[str], where: str) -> None:
    """Check the names of other plugins in a plugin's declarations. Warns about a name that is close to a known one."""
    slots = {other.slot for other in plugins if other.slot}
    for declaration in REFERENCES:
        for reference in getattr(plugin, declaration):
            found = [other for other in plugins if refers([reference], other)]
            if found and declaration == "conflicts":
                raise PluginError(
                    f"{where}: plugins {plugin.name!r} and {found[0].name!r} exclude each other: "
                    f"{plugin.conflicts[reference]} Remove one of them."
                )
            if not found and declaration == "requires":
                raise PluginError(
                    f"{where}: plugin {plugin.name!r} requires {_explain_missing(reference, plugins, names)}"
                )
            if found:
                continue
            meant = nearest(reference, names, slots)
            if not meant and ":" not in reference:
                note_once(
                    f"{where}: plugin {plugin.name!r}: {declaration} names {reference!r}, which is no installed plugin."
                )
            if meant not in ("", reference):
                slot = reference.startswith("slot:")
                problem = "no plugin of this run is in this slot" if slot else "no plugin has this name"
                warn_once(
                    f"{where}: plugin {plugin.name!r}: {declaration} names {reference!r}, and {problem}. Did you mean "
                    f"{meant!r}?"
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


def _explain_missing(reference: str, plugins: Sequence[Plugin], names: Collection[str]) -> str:
    """The end of the message for a requirement that no plugin of the run meets."""
    slot = reference.removeprefix("slot:")
    if slot != reference:
        return f"a plugin in the slot {slot!r}, which the recipe does not list. `fastloop plugins` shows who fills it."
    if reference not in names:
        return f"{reference!r}, and no plugin of this name is installed.{did_you_mean(reference, names)}"
    if load(reference).slot == "task":
        task = next((repr(other.name) for other in plugins if other.slot == "task"), "none")
        return (
            f"the task {reference!r}, and the task of this run is {task}. If any task will do, its class requires "
            "'slot:task'."
        )
    return f"{reference!r}, which the recipe does not list. Add it: --with {reference}."


def nearest(reference: str, names: Collection[str], slots: Collection[str]) -> str:
    """The name or ``slot:NAME`` that a reference is, or is close to; or an empty string."""
    kind, colon, rest = reference.partition(":")
    if not colon:
        close = difflib.get_close_matches(reference, list(names), n=1, cutoff=CLOSE)
    elif kind == "slot":
        close = [f"slot:{name}" for name in difflib.get_close_matches(rest, list(slots), n=1, cutoff=CLOSE)]
    else:  # package:name, or a misspelled "slot:"
        close = [f"slot:{rest}"] if rest in slots else [rest] if rest in names else []
    return close[0] if close else ""


def check_declarations(plugin: Plugin, where: str) -> None:
    """Check that a plugin's class declares what ``Plugin`` knows, and that its ``__init__`` calls that of ``Plugin``.

    Raises:
        PluginError: An attribute of the class resembles a declaration that it lacks, or a declaration has another type.
    """
    where = f"{where}: plugin {plugin.name!r}"
    if plugin.numerics not in get_args(Numerics):
        raise PluginError(
            f"{where} declares the numerics {plugin.numerics!r}, which is no numerics class."
            f"{did_you_mean(str(plugin.numerics), get_args(Numerics))}"
        )
    if not hasattr(plugin, "where"):
        raise PluginError(
            f"{where}: its __init__ does not call super().__init__(**options), which sets its options. Call it first."
        )
    for name, default in _DECLARED.items():
        value, kind = getattr(plugin, name), type(default)
        if kind in (tuple, dict) and (isinstance(value, str) or isinstance(value, Mapping) != (kind is dict)):
            raise PluginError(f"{where} declares {name} = {value!r}, expected a {kind.__name__}.")
    for metric, mode in plugin.adds_metrics.items():
        if mode is not None and mode not in get_args(MetricMode):
            raise PluginError(
                f"{where} declares adds_metrics with {metric!r}: {mode!r}, expected 'min' if a lower value is better, "
                "'max' if a higher one is, or None."
            )
    if (plugin.slot == Strategy.slot) != isinstance(plugin, Strategy):
        found = (
            f"slot = {plugin.slot!r}, and its class is {'' if isinstance(plugin, Strategy) else 'not '}a "
            "fastloop.Strategy"
        )
        raise PluginError(f"{where} declares {found}. The plugins in the slot 'strategy' are its subclasses.")
    classes = [cls for cls in reversed(type(plugin).__mro__) if issubclass(cls, Plugin) and cls is not Plugin]
    own = {name: value for cls in classes for name, value in vars(cls).items()}
    for name, value in own.items():
        meant = None if name in _DECLARED else _find_similar(name)
        kind = type(_DECLARED.get(meant or name))
        if meant and meant not in own and isinstance(value, _LIKE.get(kind, kind)):
            raise PluginError(
                f"{where}: its class has the attribute {name!r}, which is no declaration of a plugin. Did you mean "
                f"{meant!r}? An attribute of your own may have any name that begins with an underscore."
            )


@functools.cache
def _find_similar(name: str) -> str | None:
    """The declaration whose name is similar to this one."""
    same_letters = [known for known in _DECLARED if sorted(name) == sorted(known)]
    return next(iter(same_letters or difflib.get_close_matches(name, _DECLARED, n=1, cutoff=RESEMBLES)), None)


@functools.cache
def warn_once(message: str) -> None:
    """Log a message once per process: one command may resolve plugins several times."""
    log.warning("%s", message)


@functools.cache
def note_once(message: str) -> None:
    """Log a message that is no warning once per process."""
    log.info("%s", message)


def check_exclusive_hooks(plugins: Sequence[Plugin], reasons: dict[str, str], where: str) -> None:
    """Check that no two plugins implement one *first* hook: only one would be called.

    Args:
        plugins: In call order.
        reasons: Plugin name -> why it is in the run. Updated for plugins that leave a hook to another.

    Raises:
        PluginError: Two plugins do.
    """
    every = [
        (hook, plugin, marks["trylast"] or hook in plugin.fallback_hooks)
        for plugin in plugins
        for hook, _, marks in implementations(plugin)
        if not marks["wrapper"]
    ]
    for hook in exclusive_hooks():
        rivals = [plugin for name, plugin, is_fallback in every if name == hook and not is_fallback]
        if len(rivals) > 1:
            names, fix = _keep_one(rivals)
            raise PluginError(
                f"{where}: plugins {names} both implement {hook}, but only the first would be called. {fix} An author "
                "can wrap the other implementation (@hookimpl(wrapper=True)) or leave the hook to it (fallback_hooks = "
                f'("{hook}",)).'
            )
        for plugin in [plugin for name, plugin, is_fallback in every if rivals and name == hook and is_fallback]:
            if plugin.name in reasons:
                reasons[plugin.name] += f"; leaves {hook} to {rivals[0].name!r}"


def unsupported(point: importlib.metadata.EntryPoint) -> str:
    """Why an installed package does not support this fastloop, by its Requires-Dist; empty if it does."""
    # These take long to import, and most runs do not need them.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in (point.dist.requires if point.dist and not is_own(point) else None) or ():
        if "fastloop" not in text.lower():  # parsing takes long
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        if name not in (DISTRIBUTION, "fastloop") or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        if name != DISTRIBUTION:
            return (
                f"requires the distribution {text!r}, which is another project. Let its pyproject.toml require "
                f"{DISTRIBUTION!r} instead."
            )
        ours = importlib.metadata.version(DISTRIBUTION)
        if not requirement.specifier.contains(ours, prereleases=True):
            both = f"pip install -U {distribution_name(point)} '{DISTRIBUTION}{requirement.specifier}'"
            return (
                f"is made for fastloop {requirement.specifier}, and this is {ours}. Install versions that fit: {both}"
            )
    return ""


# -- one plugin --------------------------------------------------------------------------------------------------------


def check_hooks(plugin: Plugin, known: Mapping[str, Sequence[str]], first: Collection[str]) -> None:
    """Check that every hook of a plugin exists, takes valid arguments and is marked with ``@hookimpl``.

    Args:
        known: Hook -> its arguments, for every hook of the run.
        first: Names of the *first* hooks.

    Raises:
        PluginError: A hook is wrong; the message states how to fix it.
    """
    if plugin.read_only and plugin.numerics != "bitwise":
        raise PluginError(
            f"plugin {plugin.name!r} is declared read_only: its numerics must be bitwise, not {plugin.numerics}."
        )
    _check_unmarked(plugin, known)
    marked = list(implementations(plugin))
    for hook, method, marks in marked:
        where, wrapper = f"plugin {plugin.name!r}: {hook}", marks["wrapper"]
        if hook not in known:
            if marks["optionalhook"]:
                continue
            raise PluginError(f"plugin {plugin.name!r}: {unknown_hook(hook, known)}")
        changes_run = hook in hookspecs.CHANGING_HOOKS or hook in first
        is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        remedy = "but the plugin is declared read_only. Remove one of the two."
        problems = {
            "is marked hookwrapper=True, an older form. Mark it wrapper=True.": marks["hookwrapper"],
            "is an `async def`, and nothing would await it. Make it a `def`.": is_async,
            "cannot be a wrapper: it is called on each plugin separately.": (
                wrapper and hook in hookspecs.UNWRAPPABLE_HOOKS
            ),
            f"changes the run, {remedy}": plugin.read_only and changes_run,
            f"is a wrapper, {remedy}": plugin.read_only and wrapper,
        }
        if problem := next(filter(problems.get, problems), None):
            raise PluginError(f"{where} {problem}")
        _check_self(where, method, known[hook])
        for parameter in inspect.signature(method).parameters.values():
            check_argument(where, known[hook], parameter)
    implemented = [hook for hook, _, marks in marked if not marks["wrapper"]]
    for hook in plugin.fallback_hooks:
        if hook not in implemented or (hook in known and hook not in first):
            raise PluginError(
                f"plugin {plugin.name!r}: fallback_hooks names {hook!r}. Expected *first* hooks that the plugin "
                f"implements.{did_you_mean(hook, [name for name in implemented if name in first])}"
            )


def _check_unmarked(plugin: Plugin, known: Mapping[str, Sequence[str]]) -> None:
    """Refuse a method that has a hook's name but no ``@hookimpl``: pluggy would never call it."""
    for hook in known:
        method = getattr(type(plugin), hook, None)
        if not inspect.isroutine(method) or hasattr(method, "fastloop_impl"):
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise PluginError(
            f"plugin {plugin.name!r}: the method {hook}{place} has the name of a hook but no @hookimpl, so it would "
            "never be called. "
            f"Mark it with @hookimpl, or rename it: _{hook}."
        )


def _check_self(where: str, method: Any, known: Sequence[str]) -> None:
    """Refuse a method without ``self``: Python would pass the plugin as the hook's first argument."""
    if not inspect.ismethod(method):
        return  # a static method, or an object that is called
    first = next(iter(inspect.signature(method.__func__).parameters), None)
    if first is None or first in known:
        gets = "no argument" if first is None else f"the plugin as {first!r}"
        raise PluginError(f"{where} has no argument 'self', so it would get {gets}. Add 'self' as the first argument.")


def unknown_hook(hook: str, known: Collection[str]) -> str:
    """The message for an implementation of a hook that does not exist."""
    if hook in METHODS:
        return f"there is no hook {hook!r}. It is a method of fastloop.Strategy: subclass it, and leave out @hookimpl."
    hint = did_you_mean(hook, known) or (
        " A hook of another plugin exists only if that plugin is in the run; mark it optionalhook=True if it may be "
        "missing."
    )
    return f"there is no hook {hook!r}.{hint}"


def check_argument(where: str, known: Sequence[str], parameter: inspect.Parameter) -> None:
    """Check that a hook's implementation takes an argument as the hook passes it.

    Args:
        where: The hook, for messages.
        known: The hook's arguments.

    Raises:
        PluginError: It is none of these arguments, or cannot be passed by position.
    """
    name, has_default = parameter.name, parameter.default is not parameter.empty
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (has_default and name not in known):
        return
    if name not in known:
        raise PluginError(f"{where} gets no argument {name!r}.{did_you_mean(name, known)}")
    if has_default or parameter.kind is parameter.KEYWORD_ONLY:
        raise PluginError(
            f"{where}: the argument {name!r} must be positional and without a default, else it is not passed."
        )
