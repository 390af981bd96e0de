"""Train each plugin briefly with and without it, dropout off, and compare their losses step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastloop.numerics import BOUNDS, NOT_COMPARED, compare
from fastloop_tools.bench.plan import Ladder, closure, unresolvable, with_only
from fastloop_tools.measure.worker import Spec


def check(ladder: Ladder, steps: int, work: Callable[[Spec, str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A finding for each plugin under test.

    The control is trained twice: where a device gives other numbers for the same work, nothing can be closer than that.

    Args:
        work: Measures a specification; its second argument names the cache of what is compiled.
    """

    def train(names: tuple[str, ...]) -> dict[str, Any]:
        tree = with_only(ladder.recipe, names, max_steps=steps, epochs=10**6, save_every=None)
        return work(Spec(recipe=tree, source=None, dropout=False), "parity")

    controls: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, plugin in ladder.plugins.items():
        found: dict[str, Any] = {
            "plugin": name,
            "class": plugin.parity,
            "bound": BOUNDS.get(plugin.parity),
            "difference": None,
            "why": None,
        }
        needed = closure(ladder, name)
        together = tuple(other for other in ladder.plugins if other == name or other in needed)
        if found["bound"] is None:
            yield found | {"verdict": NOT_COMPARED, "why": "it says that it changes training"}
            continue
        if why := unresolvable(ladder, together) or unresolvable(ladder, needed):
            yield found | {"verdict": NOT_COMPARED, "why": why}
            continue
        if needed not in controls:
            controls[needed] = [train(needed), train(needed)]
        control, again = controls[needed]
        yield found | {"control": list(needed)} | compare(plugin.parity, train(together), control, again)
