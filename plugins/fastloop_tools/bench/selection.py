"""``fastloop bench --select``: finds the fastest recipe, one edit at a time.

measure the given recipe, and profile its steps
while there is time:
    of the edits for which plugins estimate a speedup, try the largest that was not tried
    then try without each plugin listed for speed, and other micro-batch sizes
    keep an edit if it is faster: a clear case needs one pair of measurements, a close one three
compare the losses of the given recipe and the result; measure both pair by pair until the result is clear; a slower one
is not written
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from statistics import median
from time import monotonic
from typing import Any, get_args

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop.errors import UsageError
from fastloop.plugins.plugin import Numerics, Plugin
from fastloop.plugins.resolve import load_listed, resolve
from fastloop.problem import counted
from fastloop.recipe import Recipe
from fastloop.speedup_estimates import StepProfile
from fastloop_tools.profile.suggestions import show_speedup, speedup, suggest
from fastloop_tools.shared.changed_recipes import edited
from fastloop_tools.trials.measure import failed_measurement
from fastloop_tools.trials.measuring_process import Window
from fastloop_tools.trials.pairs import Measurement, TrialRunner, faster, speed
from fastloop_tools.trials.statistics import break_even, interval, verdict

CLASSES = get_args(Numerics)
"""From the smallest to the largest effect on the numbers."""
CHECKS = 5
"""Pairs for the last check, if it is not clear and there is time."""
LOSSES = 3
"""Steps whose losses are compared."""
PAIRS = 3
"""Pairs for a close case."""
CLEAR = 1.3
"""Speedup from which one pair of measurements is enough."""
WORTH = 1.05
"""Speedup from which two pairs that agree are enough, or one pair and the estimate."""
LEAST = 1.02
"""Speedup from which an edit is kept after three pairs."""
ONCE = 2.0
"""Seconds. A smaller one-time cost of an edit is ignored: the start of a process varies by as much."""


@dataclass
class Trial:
    """One edit that was tried, as a user would type it, and its results. ``plugin`` is empty for the micro-batch size.

    Attributes:
        estimate: The estimated speedup; None: there was no estimate.
        ratios: Speed with it over the speed without it, pair by pair.
        why: Why it was not kept, or could not be measured.
        before, after: Seconds of a step without it and with it, in each measurement.
        once: One-time cost in seconds: extra time of the start and the first steps, with nothing compiled yet.
        pays_after: Steps until it has saved its one-time cost; None: never.
    """

    edit: str
    plugin: str
    numerics: str
    recipe: Recipe = field(repr=False)
    estimate: float | None = None
    ratios: list[float] = field(default_factory=list)
    kept: bool = False
    why: str = ""
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    once: float = 0.0
    pays_after: int | None = None

    def record(self) -> dict[str, Any]:
        """The results, without the recipe."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "recipe"}


def decide(ratios: list[float], estimate: float = 0.0) -> bool | None:
    """Whether to keep an edit with these ratios; None: another pair is needed. An estimated speedup replaces a second
    pair."""
    if min(ratios) <= 1:
        return False
    if len(ratios) == 1:
        is_enough = ratios[0] >= CLEAR or min(ratios[0], estimate) >= WORTH
        return True if is_enough else None
    if len(ratios) < PAIRS:
        return True if min(ratios) >= WORTH else None
    return median(ratios) >= LEAST


class EditSelection:
    """Finds the edits of a recipe that pay.

    Attributes:
        best: The fastest recipe so far.
        check: The comparison of the given recipe with the result.

    Args:
        accept: Numerics classes that edits may have.
        budget: Seconds that it may take.
        never: Plugins not to try.
    """

    def __init__(
        self,
        recipe: Recipe,
        accept: Collection[str],
        budget: float,
        runner: TrialRunner,
        window: Window,
        say: Callable[[str], None],
        never: Collection[str] = (),
    ) -> None:
        self.given = recipe
        self.best = recipe
        self.never = set(never)
        self.accept = accept
        self.budget = budget
        self.runner = runner
        self.window = window
        self.say = say
        self.trials: list[Trial] = []
        self.check: dict[str, Any] = {"ratios": [], "numerics": None}
        self.started = monotonic()
        self.costs: dict[str, float] = {}  # recipe -> seconds of its newest measurement

    def run(self) -> Recipe:
        """Try edits; returns the fastest recipe.

        Raises:
            FastloopError: The given recipe cannot be measured.
        """
        self.runner.listen()
        here = self.measure(self.given)
        if "error" in here:
            raise failed_measurement(f"the recipe cannot be measured: {here['error']}", here)
        rate, unit = speed(here)
        self.say(f"as given: {rate:,.1f} {unit}/s")
        self.check_budget()
        trial = self.next(here)
        while trial is not None:
            self.trials.append(trial)
            here = self.compare(trial, here)
            trial = self.next(here)
        self.check_losses()
        self.last_check()
        return self.best

    def next(self, here: Measurement) -> Trial | None:
        """The next edit that fits into the remaining time; None if there is none."""
        tried = {trial.edit for trial in self.trials}
        refused = {trial.plugin for trial in self.trials if trial.estimate is not None and not trial.kept}
        for trial in self.proposals(here):
            if trial.edit in tried or trial.numerics not in self.accept:
                continue
            if trial.estimate is not None and trial.plugin in refused:
                continue
            if self.cost(self.best) + self.reserve() <= self.left():
                return trial
            self.say("the time is over")
            return None
        return None

    def check_budget(self) -> None:
        """Check that one edit can be tried, by the first measurement.

        Raises:
            UsageError: The rest of the budget is too short.
        """
        cost = self.cost(self.given)
        missing = cost + self.reserve() - self.left()
        if missing > 0:
            raise UsageError(
                f"a measurement takes {cost:.0f} s here, and to try one edit and check it takes five more.",
                code="budget-too-small",
                place="--budget",
                remedy=f"Give at least --budget {math.ceil(self.budget + missing)}s.",
            )

    def proposals(self, here: Measurement) -> Iterator[Trial]:
        """Yield edits of the best recipe so far: those with an estimate first, the largest before others."""
        profile = StepProfile(**here["profile"])
        left_out = {trial.plugin for trial in self.trials if trial.kept and trial.estimate is None}
        suggestions, _ = suggest(profile, self.best, self.never | left_out)
        for suggestion in suggestions:
            estimate = speedup(profile, suggestion.estimate)
            yield Trial(suggestion.edit, suggestion.plugin, suggestion.numerics, suggestion.recipe, estimate)
        yield from self._without_each()
        yield from self._other_micro_batches(profile.world_size)

    def _without_each(self) -> Iterator[Trial]:
        """Yield edits that leave out a plugin of the given recipe which is there for speed: it estimates a speedup."""
        for name, options in self.given.plugins.items():
            if options is False or self.best.plugins.get(name) in (None, False):
                continue
            plugin = load_listed(self.given, name)
            estimates = plugin.estimate_speedup.__func__ is not Plugin.estimate_speedup.__func__  # type: ignore[attr-defined]
            if plugin.slot != "task" and estimates:
                with suppress(UsageError):  # the recipe cannot run then
                    yield Trial(f"--without {name}", name, plugin.numerics, edited(self.best, {}, {name: False}))

    def _other_micro_batches(self, world_size: int) -> Iterator[Trial]:
        """Yield edits to half and to twice the micro-batch size, where it divides the batch of a process."""
        whole = self.best.train.batch_size // world_size
        size = self.best.train.micro_batch_size or whole
        key = "train.micro_batch_size"
        for new_size in (size // 2, size * 2):
            if 1 <= new_size <= whole and whole % new_size == 0:
                with suppress(UsageError):
                    yield Trial(f"{key}={new_size}", "", "reassociated", edited(self.best, {key: new_size}, {}))

    def compare(self, trial: Trial, here: Measurement) -> Measurement:
        """Compare the best recipe with an edited one, and continue with the better recipe. Returns the newest
        measurement of that one."""
        base = here
        decision = None
        while decision is None:
            measured = self.measure(trial.recipe)
            if "error" in measured:
                trial.why = measured["error"]
                self.say(f"{trial.edit}: {trial.why}")
                return base
            if not trial.ratios:
                trial.once = max(0.0, one_time_cost(measured) - one_time_cost(base))
            trial.ratios.append(faster(measured, base))
            trial.before.append(base["seconds_a_step"])
            trial.after.append(measured["seconds_a_step"])
            decision = decide(trial.ratios, trial.estimate or 0.0)
            if decision is None and self.left() < self.cost(self.best) + self.cost(trial.recipe) + self.reserve():
                decision = False  # no time for a close case: the best recipe stays
            if decision is None:
                base = self.measure(self.best)
                if "error" in base:
                    trial.why = f"the recipe without it failed: {base['error']}"
                    self.say(f"{trial.edit}: {trial.why}")
                    return here
        trial.pays_after = break_even(trial.once, median(trial.before) - median(trial.after))
        length = measured["total_steps"]
        too_late = length is not None and (trial.pays_after is None or trial.pays_after >= length)
        if decision and trial.once > ONCE and too_late:
            decision = False
            trial.why = f"it costs {trial.once:.0f} s once, which {length} steps do not save"
        trial.kept = decision
        self.say(describe(trial))
        if not decision:
            return base
        self.best = trial.recipe
        return measured

    def measure(self, recipe: Recipe, number: int = 0, profiles: bool = True) -> Measurement:
        """Measure a recipe in a process of its own."""
        window = self.window if profiles else replace(self.window, profile_steps=0)
        measurement = self.runner.measure(recipe, window, number)
        if "error" not in measurement:
            self.costs[repr(recipe.to_dict())] = measurement["process_seconds"]
        return measurement

    def check_losses(self) -> None:
        """Compare losses by the weakest numerics class of the kept edits; undo all edits if they differ too much."""
        promises = {trial.numerics for trial in self.trials if trial.kept}
        if not promises:
            return
        for recipe in (self.given, self.best):
            resolved = resolve(recipe, any_machine=True)
            if any(plugin.numerics == "reduced-precision" for plugin in resolved.plugins):
                promises.add("reduced-precision")  # in few bits another order of sums is far from 1e-5
        promise = max(promises, key=CLASSES.index)
        comparison = self.runner.compare_losses(self.given, self.best, promise, LOSSES)
        self.check["numerics"] = comparison
        if comparison["verdict"] in (BROKEN, FAILED):
            reason = comparison["difference"] or comparison["why"]
            self.undo(f"the losses are not those of the recipe as given ({comparison['verdict']}, {reason})")

    def last_check(self) -> None:
        """Measure the given recipe and the result in turn; undo all edits if the result is slower."""
        if self.best is self.given:
            return
        ratios: list[float] = self.check["ratios"]
        for number in range(CHECKS):
            if ratios and (min(ratios) >= CLEAR or self.left() < self.cost(self.given) + self.cost(self.best)):
                break
            if number % 2 == 0:  # in alternating order
                given = self.measure(self.given, number, profiles=False)
                best = self.measure(self.best, number, profiles=False)
            else:
                best = self.measure(self.best, number, profiles=False)
                given = self.measure(self.given, number, profiles=False)
            error = best.get("error") or given.get("error")
            if error:
                self.check["error"] = error
                break
            ratios.append(faster(best, given))
        if not ratios:
            self.undo(f"the last check failed: {self.check['error']}")
            return
        self.check |= {"interval": list(interval(ratios)), "verdict": verdict(ratios)}
        if median(ratios) < 1:
            self.undo("the last check found it no faster than as given")

    def undo(self, why: str) -> None:
        """Return to the given recipe."""
        self.say(f"{why}: nothing is changed")
        self.best = self.given
        for trial in self.trials:
            if trial.kept:
                trial.kept = False
                trial.why = f"undone: {why}"

    def left(self) -> float:
        """Seconds left in the budget."""
        return self.budget - (monotonic() - self.started)

    def cost(self, recipe: Recipe) -> float:
        """Seconds that a measurement of a recipe took."""
        return self.costs[repr(recipe.to_dict())]

    def reserve(self) -> float:
        """Seconds needed for the checks at the end: the losses of both recipes, and one pair."""
        return 2 * (self.cost(self.given) + self.cost(self.best))

    def record(self) -> dict[str, Any]:
        """The results, for the file beside the recipe."""
        return {
            "given": self.given.to_dict(),
            "found": self.best.to_dict(),
            "accept": sorted(self.accept, key=CLASSES.index),
            "budget_seconds": self.budget,
            "seconds": monotonic() - self.started,
            "trials": [trial.record() for trial in self.trials],
            "check": self.check,
            "foreign_load": {"before": self.runner.before, "worst": self.runner.worst},
        }


def one_time_cost(measurement: Measurement) -> float:
    """Seconds until the first usual step: of the start, and of the first steps beyond usual ones."""
    return float(measurement["startup_seconds"] + measurement["warmup_extra_seconds"])


def describe(trial: Trial) -> str:
    """The result of a trial in a line: ``--with compile: x 1.42 (estimate 1.3): kept, pays after 900 steps``."""
    ratios = ", ".join(f"{ratio:.2f}" for ratio in trial.ratios)
    text = f"{trial.edit}: x {ratios}"
    if trial.estimate is not None:
        text += f" (estimate {show_speedup(trial.estimate)})"
    if not trial.kept:
        return f"{text}: {trial.why or 'not kept'}"
    text += ": kept"
    if trial.once > ONCE and trial.pays_after is not None:
        text += f", pays after {counted(trial.pays_after, 'step')}"
    return text
