"""Recipes against each other: every measurement a process of its own, compared pair by pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.bench import parity
from fastloop.bench.measure import run_worker
from fastloop.bench.plan import with_only
from fastloop.bench.results import Measurement, speed
from fastloop.bench.worker import Spec
from fastloop.recipe import Recipe


@dataclass(kw_only=True)
class Window:
    """What of a training is measured: see ``Spec``. ``timeout``: seconds for the whole process."""

    steps: int = 8
    seconds: float = 5.0
    warmup: int = 2
    looks: int = 0
    timeout: float | None = None


class Workshop:
    """Measures recipes.

    Args:
        environment: Of the measured processes: as it was before this one resolved any plugin, since that may change it.
        cache: A folder for what is compiled.
    """

    def __init__(self, environment: Mapping[str, str], cache: Path, window: Window) -> None:
        self.environment, self.cache, self.window = environment, cache, window
        self.known: dict[str, int] = {}
        self.foreign_load = 0.0

    def measure(self, recipe: Recipe, number: int = 0) -> Measurement:
        """One measurement of a recipe with all its plugins; those with the same number have the same seed. May hold an ``error``."""
        window, seed = self.window, recipe.train.seed + number
        tree = with_only(recipe, recipe.plugins, max_steps=10**9, epochs=10**6, save_every=None, seed=seed)  # the worker ends it
        spec = Spec(recipe=tree, source=None, warmup=window.warmup, steps=window.steps, seconds=window.seconds, looks=window.looks)
        return self.work(recipe, spec)

    def work(self, recipe: Recipe, spec: Spec) -> Measurement:
        """Run a specification that was made of a recipe."""
        spec.source = str(recipe.source) if recipe.source else None
        place = self.known.setdefault(repr(recipe.to_dict()), len(self.known))
        environment = {**self.environment, "TORCHINDUCTOR_CACHE_DIR": str(self.cache / str(place))}
        length = {"epochs": recipe.train.epochs, "max_steps": recipe.train.max_steps}
        found = run_worker(spec, length, environment, self.window.timeout)
        self.foreign_load = max(self.foreign_load, found["foreign_load"])
        return found

    def losses(self, recipe: Recipe, steps: int) -> Measurement:
        """The first losses of a recipe without dropout."""
        tree = with_only(recipe, recipe.plugins, max_steps=steps, epochs=10**6, save_every=None)
        return self.work(recipe, Spec(recipe=tree, source=None, dropout=False))

    def held(self, before: Recipe, after: Recipe, promise: str, steps: int = 3) -> dict[str, Any]:
        """Whether an edited recipe's losses keep a parity class's promise: ``verdict``, ``difference``, ``bound``, ``why``."""
        bound = parity.BOUNDS.get(promise)
        if bound is None:
            return {"class": promise, "verdict": parity.NOT_COMPARED, "difference": None, "bound": None, "why": "it changes training"}
        return parity.compare(promise, self.losses(after, steps), self.losses(before, steps), self.losses(before, steps))


def faster(ours: Measurement, theirs: Measurement) -> float:
    """The speed of one over the other."""
    return speed(ours)[0] / speed(theirs)[0]
