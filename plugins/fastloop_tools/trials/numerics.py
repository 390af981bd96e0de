"""Checks numerics classes: trains briefly with and without each plugin, without dropout, and compares losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastloop.cli.numerics import BOUNDS, NOT_COMPARED, compare
from fastloop_tools.bench.plan import Ablation, closure, unresolvable, with_only
from fastloop_tools.trials.worker import Spec


def check(ablation: Ablation, steps: int, work: Callable[[Spec, str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a finding for each tested plugin.

    The control is trained twice. If a device is not deterministic, the difference of both is the smallest one that can
    be detected.

    Args:
        work: Runs a specification. Its second argument names the cache of compiled code.
    """

    def train(names: tuple[str, ...]) -> dict[str, Any]:
        tree = with_only(ablation.recipe, names, max_steps=steps, epochs=10**6, save_every=None)
        return work(Spec(recipe=tree, source=None, dropout=False), "numerics")

    controls: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, plugin in ablation.plugins.items():
        found: dict[str, Any] = {
            "plugin": name,
            "class": plugin.numerics,
            "bound": BOUNDS.get(plugin.numerics),
            "difference": None,
            "why": None,
        }
        needed = closure(ablation, name)
        together = tuple(other for other in ablation.plugins if other == name or other in needed)
        if found["bound"] is None:
            yield found | {"verdict": NOT_COMPARED, "why": "its numerics class is changes-training"}
            continue
        if why := unresolvable(ablation, together) or unresolvable(ablation, needed):
            yield found | {"verdict": NOT_COMPARED, "why": why}
            continue
        if needed not in controls:
            controls[needed] = [train(needed), train(needed)]
        control, again = controls[needed]
        yield found | {"control": list(needed)} | compare(plugin.numerics, train(together), control, again)
