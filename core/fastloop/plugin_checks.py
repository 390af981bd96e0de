"""Checks of what plugins declare against what they implement, and of plugins against each other. Torch is not imported.

``check_together`` runs when a recipe is resolved, ``check_hooks`` when the hooks of a run are put together: `fastloop plan` does both.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from fastloop import hookspecs
from fastloop.errors import PluginError, did_you_mean
from fastloop.plugin import Numerics, Plugin

log = logging.getLogger("fastloop")

REFERENCES = ("requires", "conflicts", "runs_after", "runs_before")
"""Declarations that name other plugins or ``slot:NAME``."""
CLOSE = 0.8
"""Similarity in [0, 1] (difflib's ratio) from which an unknown name in a declaration counts as misspelled. It may also be the name of an
optional plugin that is not installed, which is no mistake: hence higher than the 0.6 of messages about names that must exist."""


def answered_hooks() -> list[str]:
    """Our *first* hooks that one plugin of a run answers."""
    marks = {name: getattr(spec, "fastloop_spec", None) for name, spec in vars(hookspecs).items()}
    return [name for name, mark in marks.items() if mark and mark["firstresult"] and name not in hookspecs.ASKED_IN_TURN]


def implementations(plugin: Plugin) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Hook, method and the marks of ``@hookimpl``, for each hook that a plugin implements."""
    for attribute in dir(type(plugin)):
        method = getattr(plugin, attribute)
        marks = getattr(method, "fastloop_impl", None)
        if marks is not None:
            yield marks["specname"] or attribute, method, marks


# -- together ----------------------------------------------------------------------------------------------------------


def check_together(plugins: Sequence[Plugin], installed: Collection[str], reasons: dict[str, str], where: str) -> None:
    """Check the declarations of a run's plugins.

    Args:
        plugins: In call order.
        installed: Names of the installed plugins.
        reasons: Plugin name -> why it is in the run. A plugin that leaves a hook to another gets a remark.
        where: The recipe, for messages.

    Raises:
        PluginError: A numerics class does not exist, or two plugins answer one hook.
    """
    names = {*installed, *(plugin.name for plugin in plugins)}
    slots = {plugin.slot for plugin in plugins if plugin.slot}
    for plugin in plugins:
        if plugin.numerics not in get_args(Numerics):
            raise PluginError(
                f"{where}: plugin {plugin.name!r} declares the numerics {plugin.numerics!r}, which is no numerics class."
                f"{did_you_mean(str(plugin.numerics), get_args(Numerics))}"
            )
        for message in misspelled(plugin, names, slots):
            _warn_once(f"{where}: {message}")
    _check_answers(plugins, reasons, where)


def misspelled(plugin: Plugin | type[Plugin], names: Collection[str], slots: Collection[str]) -> Iterator[str]:
    """A sentence for each reference of a plugin that matches no name and no slot, but is close to one."""
    for declaration in REFERENCES:
        for reference in getattr(plugin, declaration):
            kind, colon, rest = reference.partition(":")
            slot = kind == "slot" and bool(colon)
            if rest in slots if slot else reference in names:
                continue
            if colon and not slot:  # package:name, or a misspelled "slot:"
                close = [f"slot:{rest}"] if rest in slots else [rest] if rest in names else []
            elif slot:
                close = [f"slot:{name}" for name in difflib.get_close_matches(rest, list(slots), n=1, cutoff=CLOSE)]
            else:
                close = difflib.get_close_matches(reference, list(names), n=1, cutoff=CLOSE)
            if close:
                what = "no plugin of this run is in this slot" if slot else "no plugin has this name"
                yield f"plugin {plugin.name!r}: {declaration} names {reference!r}, and {what}. Did you mean {close[0]!r}?"


@functools.cache
def _warn_once(message: str) -> None:
    """Plugins are resolved several times in one command: a message appears once in a process."""
    log.warning("%s", message)


def _check_answers(plugins: Sequence[Plugin], reasons: dict[str, str], where: str) -> None:
    """Refuse two plugins that answer one *first* hook: only the first one would be asked."""
    answers: dict[str, list[Plugin]] = {hook: [] for hook in answered_hooks()}
    leaves: dict[str, list[Plugin]] = {hook: [] for hook in answers}
    for plugin in plugins:
        for hook, _, marks in implementations(plugin):
            if hook in answers and not marks["wrapper"]:
                (leaves if marks["trylast"] or hook in plugin.fallback_hooks else answers)[hook].append(plugin)
    for hook, several in answers.items():
        if len(several) > 1:
            *some, last = (repr(plugin.name) for plugin in several)
            keep = [f"--without {','.join(other.name for other in several if other is not plugin)}" for plugin in several]
            raise PluginError(
                f"{where}: plugins {', '.join(some)} and {last} answer {hook}, and the answer of the first would hide the others. "
                f"Keep one: {' or '.join(keep)}. An author can wrap the other plugin's answer (@hookimpl(wrapper=True)) or leave the hook "
                f'to it (fallback_hooks = ("{hook}",)).'
            )
        for plugin in leaves[hook] if several else ():
            if plugin.name in reasons:
                reasons[plugin.name] += f"; leaves {hook} to {several[0].name!r}"


# -- one by one --------------------------------------------------------------------------------------------------------


def check_hooks(plugin: Plugin, known: Mapping[str, Sequence[str]], first: Collection[str]) -> None:
    """Check that every hook of a plugin exists and takes arguments that it gets, and that none is left without ``@hookimpl``.

    Args:
        known: Hook -> its arguments, for every hook of the run.
        first: The *first* hooks among them.

    Raises:
        PluginError: Says what is wrong, and how to repair it.
    """
    if plugin.read_only and plugin.numerics != "bitwise":
        raise PluginError(
            f"plugin {plugin.name!r} says that it only looks on (`read_only`): its numerics is bitwise, not {plugin.numerics}."
        )
    _check_unmarked(plugin, known)
    answers = []
    for hook, method, marks in implementations(plugin):
        where = f"plugin {plugin.name!r}: {hook}"
        if not marks["wrapper"]:
            answers.append(hook)
        if marks["hookwrapper"]:
            raise PluginError(f"{where} is marked hookwrapper=True, an older form. Mark it wrapper=True.")
        if hook not in known:
            if marks["optionalhook"]:
                continue
            hint = did_you_mean(hook, known) or (
                " Another plugin's hook is known when that plugin is in the run. Marked optionalhook=True, it may be missing."
            )
            raise PluginError(f"plugin {plugin.name!r}: there is no hook {hook!r}.{hint}")
        if hook in hookspecs.ONE_BY_ONE and marks["wrapper"]:
            raise PluginError(f"{where} cannot be a wrapper: it is called on each plugin by itself.")
        decides = hook in hookspecs.CHANGE or hook in first
        if plugin.read_only and (decides or marks["wrapper"]):
            how = "changes or decides something" if decides else "is a wrapper here"
            raise PluginError(f"{where} {how}, and the plugin says that it only looks on (`read_only`). Leave one of the two out.")
        for parameter in inspect.signature(method).parameters.values():
            _check_argument(where, known[hook], parameter)
    for hook in plugin.fallback_hooks:
        if hook not in answers or (hook in known and hook not in first):
            possible = [name for name in answers if name in first]
            raise PluginError(
                f"plugin {plugin.name!r}: fallback_hooks names {hook!r}. Expected *first* hooks that the plugin answers itself."
                f"{did_you_mean(hook, possible)}"
            )


def _check_unmarked(plugin: Plugin, known: Mapping[str, Sequence[str]]) -> None:
    """Refuse a method that has a hook's name and no ``@hookimpl``: pluggy would never call it."""
    for hook in known:
        method = getattr(type(plugin), hook, None)
        if not inspect.isroutine(method) or hasattr(method, "fastloop_impl"):
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise PluginError(
            f"plugin {plugin.name!r}: the method {hook}{place} has the name of a hook and no @hookimpl, so the hook would never call it. "
            f"Mark it with @hookimpl, or rename it: _{hook}."
        )


def _check_argument(where: str, gets: Sequence[str], parameter: inspect.Parameter) -> None:
    name, given = parameter.name, parameter.default is not parameter.empty
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (given and name not in gets):
        return
    if name not in gets:
        raise PluginError(f"{where} gets no argument {name!r}.{did_you_mean(name, gets)}")
    if given or parameter.kind is parameter.KEYWORD_ONLY:
        raise PluginError(f"{where}: the argument {name!r} must be positional and without a default, else it is not passed.")
