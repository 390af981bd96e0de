"""The call order of a run's plugins, from ``runs_after`` and ``runs_before``."""

from __future__ import annotations

import graphlib
import heapq
import itertools

from fastloop.errors import PluginError
from fastloop.plugin import Plugin


def order(plugins: list[Plugin], reasons: dict[str, str], where: str) -> list[Plugin]:
    """Recipe order with the fewest moves for ``runs_after`` and ``runs_before`` (Kahn's algorithm, earliest index
    first)."""
    position = {plugin.name: index for index, plugin in enumerate(plugins)}
    before: dict[str, set[str]] = {plugin.name: set() for plugin in plugins}
    for plugin in plugins:
        for reference in plugin.runs_after:
            before[plugin.name] |= {other.name for other in matching(reference, plugins)} - {plugin.name}
        for reference in plugin.runs_before:
            for other in matching(reference, plugins):
                before[other.name] |= {plugin.name} - {other.name}
    sorter = graphlib.TopologicalSorter(before)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise PluginError(f"{where}: {_explain_cycle(error.args[1], plugins)}") from None
    ready = sorted(position[name] for name in sorter.get_ready())
    ordered: list[Plugin] = []
    while ready:
        plugin = plugins[heapq.heappop(ready)]
        ordered.append(plugin)
        sorter.done(plugin.name)
        for name in sorter.get_ready():
            heapq.heappush(ready, position[name])
            if position[name] < position[plugin.name]:
                reasons[name] += f"; moved after {plugin.name!r}"
    return ordered


def _explain_cycle(names: list[str], plugins: list[Plugin]) -> str:
    """The declarations that make a cycle, in which each name runs before the next, and one of them to drop."""
    by_name = {plugin.name: plugin for plugin in plugins}
    declarations = []
    for first, second in itertools.pairwise(names):
        for owner, attribute, other in ((second, "runs_after", first), (first, "runs_before", second)):
            for reference in getattr(by_name[owner], attribute):
                if by_name[other] in matching(reference, plugins):
                    declarations.append(f"{owner!r} {attribute} {reference!r}")
    return (
        f"the order of plugins is a cycle: {', '.join(declarations)}. Drop one of these declarations, or a "
        f"plugin: --without {names[0]}."
    )


def matching(reference: str, plugins: list[Plugin]) -> list[Plugin]:
    """The plugins that a declaration refers to by name or by ``slot:NAME``."""
    return [plugin for plugin in plugins if reference in (plugin.name, f"slot:{plugin.slot}")]
