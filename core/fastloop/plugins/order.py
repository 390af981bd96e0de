"""The call order of a run's plugins."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fastloop.plugins.plugin import Plugin


def refers(references: Collection[str], plugin: Plugin) -> bool:
    """Whether one of a declaration's references, by name or by ``slot:NAME``, is to a plugin."""
    return plugin.name in references or f"slot:{plugin.slot}" in references


def predecessors(plugins: Sequence[Plugin]) -> dict[str, set[str]]:
    """Plugin name -> names of the plugins that must be before it."""
    before: dict[str, set[str]] = {}
    for plugin in plugins:
        before[plugin.name] = set()
        for other in plugins:
            is_before = refers(plugin.runs_after, other) or refers(other.runs_before, plugin)
            if other is not plugin and is_before:
                before[plugin.name].add(other.name)
    return before


def order(plugins: list[Plugin], reasons: dict[str, str]) -> list[Plugin]:
    """Recipe order with the fewest moves for ``runs_after`` and ``runs_before``: the next plugin is always the earliest
    whose predecessors are in order."""
    before = predecessors(plugins)
    rest = list(plugins)
    ordered: list[Plugin] = []
    while rest:
        waiting = {plugin.name for plugin in rest}
        plugin = next(plugin for plugin in rest if not before[plugin.name] & waiting)
        rest.remove(plugin)
        awaited = [other for other in ordered if other.name in before[plugin.name]]
        if awaited and plugins.index(awaited[-1]) > plugins.index(plugin):
            reasons[plugin.name] += f"; moved after {awaited[-1].name!r}"
        ordered.append(plugin)
    return ordered
