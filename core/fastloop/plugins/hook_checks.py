"""Check the hooks that a plugin implements, when a run registers them: names, arguments and marks.

The names and arguments are those of ``hookspecs``: a new hook needs nothing here. Does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fastloop import hookspecs
from fastloop.errors import PluginError, did_you_mean
from fastloop.plugins.plugin import Plugin
from fastloop.strategy import METHODS


def implementations(plugin: Plugin) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """``(hook, method, marks of @hookimpl)`` for each hook that a plugin implements, by the names of its attributes."""
    attributes: dict[str, Any] = {}
    for cls in reversed(type(plugin).__mro__):
        attributes |= vars(cls)
    for name in sorted(attributes):
        if name.startswith("__"):
            continue
        if isinstance(attributes[name], property):
            continue  # it may read attributes that only a hook sets
        method = getattr(plugin, name)
        marks = getattr(method, "fastloop_impl", None)
        if marks is not None:
            yield marks["specname"] or name, method, marks


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
            f"plugin {plugin.name!r} is declared read_only: its numerics must be bitwise, not {plugin.numerics}.",
            code="invalid-declaration",
        )
    _check_unmarked(plugin, known)
    marked = list(implementations(plugin))
    for hook, method, marks in marked:
        if hook not in known:
            if marks["optionalhook"]:
                continue
            raise PluginError(unknown_hook(hook, known), code="unknown-hook", place=f"plugin {plugin.name!r}")
        where = f"plugin {plugin.name!r}: {hook}"
        changes_run = hook in hookspecs.CHANGING_HOOKS or hook in first
        problem = _find_problem(plugin, hook, method, marks, changes_run)
        if problem:
            raise PluginError(f"{where} {problem}", code="invalid-hook")
        for parameter in _parameters(where, method, known[hook]):
            check_argument(where, known[hook], parameter)
    implemented = [hook for hook, _, marks in marked if not marks["wrapper"]]
    for hook in plugin.fallback_hooks:
        if hook not in implemented or (hook in known and hook not in first):
            raise PluginError(
                f"fallback_hooks names {hook!r}. Expected *first* hooks that the plugin implements.",
                code="unknown-hook",
                place=f"plugin {plugin.name!r}",
                remedy=did_you_mean(hook, [name for name in implemented if name in first]),
            )


def _find_problem(plugin: Plugin, hook: str, method: Any, marks: Mapping[str, Any], changes_run: bool) -> str:
    """Why an implementation is invalid, as the end of a sentence, and the remedy; empty: it is valid.

    Args:
        changes_run: Whether the hook changes a run.
    """
    if marks["hookwrapper"]:
        return "is marked hookwrapper=True, an older form. Mark it wrapper=True."
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return "is an `async def`, and nothing would await it. Make it a `def`."
    if marks["wrapper"] and hook in hookspecs.UNWRAPPABLE_HOOKS:
        return "cannot be a wrapper: it is called on each plugin separately."
    if plugin.read_only and changes_run:
        return "changes the run, but the plugin is declared read_only. Remove one of the two."
    if plugin.read_only and marks["wrapper"]:
        return "is a wrapper, but the plugin is declared read_only. Remove one of the two."
    return ""


def _check_unmarked(plugin: Plugin, known: Mapping[str, Sequence[str]]) -> None:
    """Refuse a method that has a hook's name but no ``@hookimpl``: pluggy would never call it."""
    for hook in known:
        method = getattr(type(plugin), hook, None)
        if not inspect.isroutine(method) or hasattr(method, "fastloop_impl"):
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise PluginError(
            f"the method {hook}{place} has the name of a hook but no @hookimpl, so it would never be called.",
            code="unmarked-hook",
            place=f"plugin {plugin.name!r}",
            remedy=f"Mark it with @hookimpl, or rename it: _{hook}.",
        )


def _parameters(where: str, method: Any, known: Sequence[str]) -> list[inspect.Parameter]:
    """The parameters of an implementation, without ``self``.

    Args:
        where: The hook, for messages.
        known: The hook's arguments.

    Raises:
        PluginError: The method has no ``self``: Python would pass the plugin as the hook's first argument.
    """
    if not inspect.ismethod(method):  # a static method, or an object that is called
        return [*inspect.signature(method).parameters.values()]
    parameters = [*inspect.signature(method.__func__).parameters.values()]
    first = parameters[0].name if parameters else None
    if first is None or first in known:
        gets = "no argument" if first is None else f"the plugin as {first!r}"
        raise PluginError(
            f"{where} has no argument 'self', so it would get {gets}.",
            code="invalid-hook",
            remedy="Add 'self' as the first argument.",
        )
    if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:  # def after_step(*arguments)
        return parameters
    return parameters[1:]


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
    name = parameter.name
    has_default = parameter.default is not parameter.empty
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (has_default and name not in known):
        return
    if name not in known:
        raise PluginError(
            f"gets no argument {name!r}.", code="unknown-argument", place=where, remedy=did_you_mean(name, known)
        )
    if has_default or parameter.kind is parameter.KEYWORD_ONLY:
        raise PluginError(
            f"the argument {name!r} must be positional and without a default, else it is not passed.",
            code="invalid-hook",
            place=where,
        )
