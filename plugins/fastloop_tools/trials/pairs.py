"""Compares recipes pair by pair, each measurement in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.cli.numerics import BOUNDS, BROKEN, NOT_COMPARED, compare
from fastloop.recipe import Recipe
from fastloop_tools.bench.plan import with_only
from fastloop_tools.trials.measure import LOUD, foreign_load
from fastloop_tools.trials.results import Measurement, speed
from fastloop_tools.trials.server import Servers, run_worker
from fastloop_tools.trials.worker import Spec


@dataclass(kw_only=True)
class Window:
    """The measured part of a training; see ``Spec``."""

    steps: int = 8
    seconds: float = 5.0
    warmup: int = 2
    profile_steps: int = 0

    def duration(self, step: float) -> float:
        """Seconds of the warm-up and the window, for steps of ``step`` seconds."""
        return max((self.warmup + self.steps) * step, self.warmup * step + self.seconds)


class TrialRunner:
    """Runs each training in processes of its own.

    Args:
        environment: Their environment variables, saved before this process resolved any plugin, which may change them.
        cache: Folder for compiled code.
        say: Called with a line of text for each disturbed measurement.
        nproc: Processes of each training.
        timeout: Seconds that a training may take; None: no limit.
        modules: Modules that each training imports, for the servers that fork its processes; see
            ``fastloop_tools.trials.server``. None: each process is a fresh one.

    Attributes:
        before: Share of the machine that other processes used when ``listen`` was called.
        worst: Largest share that they used during a measurement.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        cache: Path,
        say: Callable[[str], None],
        nproc: int = 1,
        timeout: float | None = None,
        modules: tuple[str, ...] | None = None,
    ) -> None:
        self.environment, self.cache, self.say, self.nproc, self.timeout = environment, cache, say, nproc, timeout
        self.servers = Servers(modules) if modules is not None else None
        self.known: dict[str, int] = {}
        self.before = self.worst = 0.0

    def close(self) -> None:
        """End the servers."""
        if self.servers is not None:
            self.servers.close()

    def listen(self) -> None:
        """Measure the load of other processes before the start."""
        self.before = foreign_load()
        if self.before > LOUD:
            self.say(f"other processes use {self.before:.0%} of this machine: intervals will be wide")

    def work(self, recipe: Recipe, spec: Spec, name: str | None = None, fresh: bool = False) -> Measurement:
        """Run a specification made from a recipe.

        Args:
            name: Name of the cache of compiled code: the first run with a name compiles, later ones reuse it. None: one
                cache for each recipe.
            fresh: Whether the process imports all that it needs itself, so that its start and its memory are those of a
                user's run.
        """
        spec.source = str(recipe.source) if recipe.source else None
        place = self.known.setdefault(name or repr(recipe.to_dict()), len(self.known))
        environment = {**self.environment, "TORCHINDUCTOR_CACHE_DIR": str(self.cache / str(place))}
        length = {"epochs": recipe.train.epochs, "max_steps": recipe.train.max_steps}
        return run_worker(spec, length, environment, self.timeout, self.nproc, None if fresh else self.servers)

    def undisturbed(self, recipe: Recipe, spec: Spec, name: str | None = None, fresh: bool = False) -> Measurement:
        """Run ``work``, and repeat it if other processes disturbed it; returns the less disturbed result."""
        found = self.work(recipe, spec, name, fresh)
        if found["foreign_load"] > LOUD >= self.before:  # on a machine that is always busy, a repeat does not help
            self.say(f"other processes used {found['foreign_load']:.0%} of the machine meanwhile: measured again")
            found = min(found, self.work(recipe, spec, name, fresh), key=lambda result: float(result["foreign_load"]))
        self.worst = max(self.worst, found["foreign_load"])
        return found

    def measure(self, recipe: Recipe, window: Window, number: int = 0) -> Measurement:
        """Measure a recipe with all its plugins. The same ``number`` gives the same seed. The result may hold an
        ``error``."""
        seed = recipe.train.seed + number
        # the worker ends the run
        tree = with_only(recipe, recipe.plugins, max_steps=10**9, epochs=10**6, save_every=None, seed=seed)
        spec = Spec(
            recipe=tree,
            source=None,
            warmup=window.warmup,
            steps=window.steps,
            seconds=window.seconds,
            profile_steps=window.profile_steps,
        )
        return self.undisturbed(recipe, spec)

    def losses(self, recipe: Recipe, steps: int) -> Measurement:
        """Train the first steps of a recipe without dropout, for their losses."""
        tree = with_only(recipe, recipe.plugins, max_steps=steps, epochs=10**6, save_every=None)
        return self.work(recipe, Spec(recipe=tree, source=None, dropout=False))

    def held(self, before: Recipe, after: Recipe, promise: str, steps: int) -> dict[str, Any]:
        """Compare an edited recipe's losses with a numerics class: ``verdict``, ``difference``, ``bound``, ``why``."""
        bound = BOUNDS.get(promise)
        if bound is None:
            return {
                "class": promise,
                "verdict": NOT_COMPARED,
                "difference": None,
                "bound": None,
                "why": "it changes training",
            }
        ours, theirs = self.losses(after, steps), self.losses(before, steps)
        found = compare(promise, ours, theirs, theirs)
        if found["verdict"] == BROKEN:  # train the first recipe twice, in case it is not deterministic
            found = compare(promise, ours, theirs, self.losses(before, steps))
        return found


def faster(ours: Measurement, theirs: Measurement) -> float:
    """The ratio of two speeds."""
    return speed(ours)[0] / speed(theirs)[0]
