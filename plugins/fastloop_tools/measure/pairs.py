"""Recipes against each other: every measurement in processes of its own, compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.numerics import BOUNDS, BROKEN, NOT_COMPARED, compare
from fastloop.recipe import Recipe
from fastloop_tools.bench.plan import with_only
from fastloop_tools.measure.measure import LOUD, foreign_load, run_worker
from fastloop_tools.measure.results import Measurement, speed
from fastloop_tools.measure.worker import Spec


@dataclass(kw_only=True)
class Window:
    """What of a training is measured: see ``Spec``."""

    steps: int = 8
    seconds: float = 5.0
    warmup: int = 2
    profile_steps: int = 0


class TrialRunner:
    """Runs trainings in fresh processes.

    Args:
        environment: Of those processes: as it was before this one resolved any plugin, since that may change it.
        cache: A folder for what is compiled.
        say: Gets a line for what was disturbed.
        nproc: Processes of a training.
        timeout: Seconds that one may take; None: any.

    Attributes:
        before: The share of the machine that others used when ``listen`` was called.
        worst: The largest share that they used during a measurement.
    """

    def __init__(
        self, environment: Mapping[str, str], cache: Path, say: Callable[[str], None], nproc: int = 1, timeout: float | None = None
    ) -> None:
        self.environment, self.cache, self.say, self.nproc, self.timeout = environment, cache, say, nproc, timeout
        self.known: dict[str, int] = {}
        self.before = self.worst = 0.0

    def listen(self) -> None:
        """Hear what others do on this machine."""
        self.before = foreign_load()
        if self.before > LOUD:
            self.say(f"other work uses {self.before:.0%} of this machine: intervals will be wide")

    def work(self, recipe: Recipe, spec: Spec, name: str | None = None) -> Measurement:
        """Run a specification that was made of a recipe.

        Args:
            name: What is compiled is kept under it, so that the first one compiles and the next find it done; None: one for each recipe.
        """
        spec.source = str(recipe.source) if recipe.source else None
        place = self.known.setdefault(name or repr(recipe.to_dict()), len(self.known))
        environment = {**self.environment, "TORCHINDUCTOR_CACHE_DIR": str(self.cache / str(place))}
        length = {"epochs": recipe.train.epochs, "max_steps": recipe.train.max_steps}
        return run_worker(spec, length, environment, self.timeout, self.nproc)

    def undisturbed(self, recipe: Recipe, spec: Spec, name: str | None = None) -> Measurement:
        """``work``, and once more when other work took much of the machine meanwhile; the quieter one counts."""
        found = self.work(recipe, spec, name)
        if found["foreign_load"] > LOUD >= self.before:  # a machine that is never quiet gets what it gives
            self.say(f"other work took {found['foreign_load']:.0%} of the machine meanwhile: measured again")
            found = min(found, self.work(recipe, spec, name), key=lambda result: float(result["foreign_load"]))
        self.worst = max(self.worst, found["foreign_load"])
        return found

    def measure(self, recipe: Recipe, window: Window, number: int = 0) -> Measurement:
        """One measurement of a recipe with all its plugins; those with the same number have the same seed. May hold an ``error``."""
        seed = recipe.train.seed + number
        tree = with_only(recipe, recipe.plugins, max_steps=10**9, epochs=10**6, save_every=None, seed=seed)  # the worker ends it
        spec = Spec(
            recipe=tree, source=None, warmup=window.warmup, steps=window.steps, seconds=window.seconds, profile_steps=window.profile_steps
        )
        return self.undisturbed(recipe, spec)

    def losses(self, recipe: Recipe, steps: int) -> Measurement:
        """The first losses of a recipe without dropout."""
        tree = with_only(recipe, recipe.plugins, max_steps=steps, epochs=10**6, save_every=None)
        return self.work(recipe, Spec(recipe=tree, source=None, dropout=False))

    def held(self, before: Recipe, after: Recipe, promise: str, steps: int) -> dict[str, Any]:
        """Whether an edited recipe's losses keep a numerics class's promise: ``verdict``, ``difference``, ``bound``, ``why``."""
        bound = BOUNDS.get(promise)
        if bound is None:
            return {"class": promise, "verdict": NOT_COMPARED, "difference": None, "bound": None, "why": "it changes training"}
        ours, theirs = self.losses(after, steps), self.losses(before, steps)
        found = compare(promise, ours, theirs, theirs)
        if found["verdict"] == BROKEN:  # unless a second training of the same recipe differs by as much
            found = compare(promise, ours, theirs, self.losses(before, steps))
        return found


def faster(ours: Measurement, theirs: Measurement) -> float:
    """The speed of one over the other."""
    return speed(ours)[0] / speed(theirs)[0]
