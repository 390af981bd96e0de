"""Compares recipes pair by pair, each measurement in processes of its own."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import typer

from fastloop.cli.numerics import BOUNDS, BROKEN, NOT_COMPARED, compare
from fastloop.recipe import Recipe
from fastloop_tools.bench.plan import with_only
from fastloop_tools.trials.measure import LOUD, foreign_load
from fastloop_tools.trials.server import Servers, libraries, run_worker
from fastloop_tools.trials.worker import Spec, Window

Measurement = dict[str, Any]
"""The result of ``run_worker``."""


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

    @classmethod
    @contextmanager
    def open(cls, command: str, environment: Mapping[str, str], recipe: Recipe, **options: Any) -> Iterator[Self]:
        """A runner for the variants of a recipe, with a temporary cache and, where processes can be forked, servers."""
        with tempfile.TemporaryDirectory(prefix=f"fastloop-{command}-") as cache:
            runner = cls(environment, Path(cache), typer.echo, modules=libraries(recipe), **options)
            with closing(runner):
                yield runner

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

    def train(
        self,
        recipe: Recipe,
        plugins: Collection[str] | None = None,
        name: str | None = None,
        fresh: bool = False,
        *,
        spec: Mapping[str, Any] = MappingProxyType({}),
        **train: Any,
    ) -> Measurement:
        """Train a recipe; see ``work``. The result may hold an ``error``.

        Args:
            plugins: The active plugins; None: those of the recipe.
            spec: Further settings of ``Spec``.
            train: Keys of the ``train`` section to set.
        """
        tree = with_only(recipe, recipe.plugins if plugins is None else plugins, save_every=None, **train)
        return self.work(recipe, Spec(recipe=tree, source=None, **spec), name, fresh)

    def measure(self, recipe: Recipe, window: Window, number: int = 0, *how: Any, fresh: bool = False) -> Measurement:
        """Measure a recipe. The same ``number`` gives the same seed. Further arguments are those of ``train``."""
        spec = {field.name: getattr(window, field.name) for field in dataclasses.fields(Window)}
        train = {"max_steps": 10**9, "epochs": 10**6, "seed": recipe.train.seed + number}  # the worker ends the run
        more: dict[str, Any] = {"spec": spec, "fresh": fresh, **train}
        found = self.train(recipe, *how, **more)
        if found["foreign_load"] > LOUD >= self.before:  # on a machine that is always busy, a repeat does not help
            self.say(f"other processes used {found['foreign_load']:.0%} of the machine meanwhile: measured again")
            found = min(found, self.train(recipe, *how, **more), key=lambda result: float(result["foreign_load"]))
        self.worst = max(self.worst, found["foreign_load"])
        return found

    def losses(self, recipe: Recipe, steps: int, *how: Any) -> Measurement:
        """Train the first steps of a recipe without dropout, for their losses; see ``train``."""
        return self.train(recipe, *how, spec={"dropout": False}, max_steps=steps, epochs=10**6)

    def held(self, before: Recipe, after: Recipe, promise: str, steps: int) -> dict[str, Any]:
        """Compare an edited recipe's losses with a numerics class: ``verdict``, ``difference``, ``bound``, ``why``."""
        if promise not in BOUNDS:
            why = "it changes training"
            return {"class": promise, "verdict": NOT_COMPARED, "difference": None, "bound": None, "why": why}
        ours, theirs = self.losses(after, steps), self.losses(before, steps)
        found = compare(promise, ours, theirs, theirs)
        if found["verdict"] == BROKEN:  # train the first recipe twice, in case it is not deterministic
            found = compare(promise, ours, theirs, self.losses(before, steps))
        return found


def speed(found: Measurement) -> tuple[float, str]:
    """The speed and its unit: real tokens a second if the task counts tokens, else samples a second.

    If a plugin changes the batches, a short window contains other texts. Tokens are then a fairer measure of work.
    """
    unit = "tokens" if found["tokens"] else "samples"
    return found[unit] / found["seconds"], unit


def faster(ours: Measurement, theirs: Measurement) -> float:
    """The ratio of two speeds."""
    return speed(ours)[0] / speed(theirs)[0]
