"""The call order of a run's plugins, from ``runs_after`` and ``runs_before``."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Collection

from fastloop.errors import PluginError
from fastloop.plugin import Plugin


def order(plugins: list[Plugin], reasons: dict[str, str], where: str) -> list[Plugin]:
    """Recipe order with the fewest moves for ``runs_after`` and ``runs_before``: the next plugin is always the earliest
    whose predecessors are in order."""
    before = {
        plugin.name: {
            other.name
            for other in plugins
            if other is not plugin and (refers(plugin.runs_after, other) or refers(other.runs_before, plugin))
        }
        for plugin in plugins
    }
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        raise PluginError(f"{where}: {_explain_cycle(error.args[1], plugins)}") from None
    rest, ordered = list(plugins), list[Plugin]()
    while rest:
        plugin = next(plugin for plugin in rest if not before[plugin.name] & {other.name for other in rest})
        rest.remove(plugin)
        awaited = [other for other in ordered if other.name in before[plugin.name]]
        if awaited and plugins.index(awaited[-1]) > plugins.index(plugin):
            reasons[plugin.name] += f"; moved after {awaited[-1].name!r}"
        ordered.append(plugin)
    return ordered


def _explain_cycle(names: list[str], plugins: list[Plugin]) -> str:
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


def refers(references: Collection[str], plugin: Plugin) -> bool:
    """Whether one of a declaration's references, by name or by ``slot:NAME``, is to a plugin."""
    return plugin.name in references or f"slot:{plugin.slot}" in references
