"""Compares recipes pair by pair, each measurement in processes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastloop.cli import startup
from fastloop.cli.numerics import BOUNDS, BROKEN, NOT_COMPARED, compare
from fastloop.errors import FastloopError
from fastloop.recipe import Recipe, make_recipe
from fastloop_tools.shared.changed_recipes import with_only
from fastloop_tools.trials.measure import LOUD, foreign_load, run_process
from fastloop_tools.trials.measuring_process import Spec, Window

Measurement = dict[str, Any]
"""The result of ``run_process``."""


class TrialRunner:
    """Runs each training in a process of its own.

    Args:
        environment: Their environment variables, saved before this process resolved any plugin, which may change them.
        cache: Folder for compiled code.
        say: Called with a line of text for each disturbed measurement.
        timeout: Seconds that a training may take; None: no limit.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        cache: Path,
        say: Callable[[str], None],
        timeout: float | None = None,
    ) -> None:
        self.environment = environment
        self.cache = cache
        self.say = say
        self.timeout = timeout
        self.known: dict[str, int] = {}  # name of a cache -> its folder
        self.before = 0.0  # the load of other processes, as a share of the machine
        self.worst = 0.0

    def listen(self) -> None:
        """Measure the load of other processes before the start."""
        self.before = foreign_load()
        if self.before > LOUD:
            self.say(f"other processes use {self.before:.0%} of this machine: intervals will be wide")

    def train(
        self,
        recipe: Recipe,
        plugins: Collection[str] | None = None,
        name: str | None = None,
        *,
        spec: Mapping[str, Any] = MappingProxyType({}),
        **train: Any,
    ) -> Measurement:
        """Train a recipe in a process of its own. The result may hold an ``error``; see ``run_process``.

        Args:
            plugins: The active plugins; None: those of the recipe.
            name: Name of the cache of compiled code: the first run with a name compiles, later ones reuse it.
            spec: Further settings of ``Spec``.
            train: Keys of the ``train`` section to set.
        """
        tree = with_only(recipe, recipe.plugins if plugins is None else plugins, save_every=None, **train)
        needed: dict[str, str] = {}
        with suppress(FastloopError):  # the process reports the error
            needed = startup.environment(startup.resolve_early(make_recipe(tree, recipe.source)))
        place = self.known.setdefault(name or repr(recipe.to_dict()), len(self.known))
        environment = {**needed, **self.environment, "TORCHINDUCTOR_CACHE_DIR": str(self.cache / str(place))}
        complete = Spec(recipe=tree, source=str(recipe.source) if recipe.source else None, **spec)
        length = {"epochs": recipe.train.epochs, "max_steps": recipe.train.max_steps}
        return run_process(complete, length, environment, self.timeout)

    def measure(self, recipe: Recipe, window: Window, number: int = 0, *how: Any) -> Measurement:
        """Measure a recipe. The same ``number`` gives the same seed. Further arguments are those of ``train``."""
        spec = {field.name: getattr(window, field.name) for field in dataclasses.fields(Window)}
        train = {"max_steps": 10**9, "epochs": None, "seed": recipe.train.seed + number}  # the worker ends the run
        more: dict[str, Any] = {"spec": spec, **train}
        measurement = self.train(recipe, *how, **more)
        load = measurement["foreign_load"]
        if load > LOUD:
            self.say(f"other processes used {load:.0%} of the machine meanwhile")
        self.worst = max(self.worst, load)
        return measurement

    def losses(self, recipe: Recipe, steps: int, *how: Any) -> Measurement:
        """Train the first steps of a recipe without dropout, for their losses; see ``train``."""
        return self.train(recipe, *how, spec={"dropout": False}, max_steps=steps, epochs=None)

    def compare_losses(self, before: Recipe, after: Recipe, promise: str, steps: int) -> dict[str, Any]:
        """Compare an edited recipe's losses with a numerics class: ``verdict``, ``difference``, ``bound``, ``why``."""
        if promise not in BOUNDS:
            why = "it changes training"
            return {"class": promise, "verdict": NOT_COMPARED, "difference": None, "bound": None, "why": why}
        edited_losses = self.losses(after, steps)
        control = self.losses(before, steps)
        comparison = compare(promise, edited_losses, control, control)
        if comparison["verdict"] == BROKEN:  # train the first recipe twice, in case it is not deterministic
            comparison = compare(promise, edited_losses, control, self.losses(before, steps))
        return comparison


def speed(measurement: Measurement) -> tuple[float, str]:
    """The speed and its unit: real tokens a second if the task counts tokens, else samples a second.

    If a plugin changes the batches, a short window contains other texts. Tokens are then a fairer measure of work.
    """
    unit = "tokens" if measurement["tokens"] else "samples"
    return measurement[unit] / measurement["seconds"], unit


def faster(measured: Measurement, reference: Measurement) -> float:
    """How many times as fast a measurement is as another one."""
    measured_speed, _ = speed(measured)
    reference_speed, _ = speed(reference)
    return measured_speed / reference_speed
