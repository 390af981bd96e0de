"""Plugins are held to their parity class: short trainings with and without each, dropout off, and their losses step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastloop.bench.plan import Ladder, closure, unresolvable, with_only
from fastloop.bench.statistics import largest_difference
from fastloop.bench.worker import Spec

BOUNDS = {"exact": 0.0, "reassociated": 1e-5, "reduced-precision": 0.1}
"""Largest relative difference of a step's loss that a class allows. What changes the training is not compared."""
HOLDS, BROKEN, FAILED, NOT_COMPARED = "holds", "broken", "failed", "not compared"


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


def compare(promise: str, ours: dict[str, Any], control: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Losses against those of a control that was trained twice.

    Args:
        promise: A parity class that has a bound.
    """
    bound = BOUNDS[promise]
    found: dict[str, Any] = {"class": promise, "bound": bound, "difference": None, "why": None}
    if failed := [result["error"] for result in (ours, control, again) if "error" in result]:
        return found | {"verdict": FAILED, "why": failed[0]}
    noise = largest_difference(again["losses"], control["losses"])
    difference = largest_difference(ours["losses"], control["losses"])
    return found | {
        "verdict": HOLDS if difference <= max(bound, 2 * noise) else BROKEN,
        "difference": difference,
        "noise": noise,
        "losses": ours["losses"],
        "control_losses": control["losses"],
    }
