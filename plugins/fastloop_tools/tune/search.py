"""Search for the fastest recipe: first all edits that are estimated to be faster at once, then one edit at a time.

measure the given recipe, and profile its steps
if the recipe with all edits of plugins for which a speedup is estimated is faster, continue with it
while there is time:
    of the further edits for which plugins estimate a speedup, try the largest that was not tried
    keep it if it is faster: a clear case needs one pair of measurements, a close one three
try without each of the edits that were made at once, without each plugin listed for speed, and other micro-batch sizes
compare the losses of the given recipe and the result; measure both pair by pair until the result is clear; a slower one
is not written

Making many edits at once saves time: most measurements are then of a fast recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any, get_args

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop.errors import FastloopError, UsageError
from fastloop.estimates import StepProfile
from fastloop.plugins.plugin import Numerics, Plugin
from fastloop.plugins.resolve import load_listed, resolve
from fastloop.recipe import Recipe
from fastloop_tools.bench.plan import edited
from fastloop_tools.profile.suggestions import Suggestion, suggest
from fastloop_tools.trials.pairs import Measurement, TrialRunner, faster, speed
from fastloop_tools.trials.statistics import break_even, interval, median, verdict
from fastloop_tools.trials.worker import Window

CLASSES = get_args(Numerics)
"""From the smallest to the largest effect on the numbers."""
CHECKS = 5
"""Pairs for the last check, if it is not clear and there is time."""
LOSSES = 3
"""Steps whose losses are compared."""
PAIRS = 3
"""Pairs for a close case."""
CLEAR, WORTH, LEAST = 1.3, 1.05, 1.02
"""Speedups that need one pair; two pairs that agree, or one pair and the estimate; and three pairs."""
ONCE = 2.0
"""Seconds. A smaller one-time cost of an edit is ignored: the start of a process varies by as much."""
MORE = 2
"""Further pairs for an edit that was slower in one: the interval of five reaches the smallest ratio, that of seven the
second smallest."""


@dataclass
class Trial:
    """One edit that was tried, and its results.

    Attributes:
        edit: The edit as a user would type it.
        plugin: Its plugin; empty for the micro-batch size, and for several plugins at once.
        numerics: Its numerics class.
        estimate: The estimated speedup; None: there was no estimate.
        ratios: Speed with it over the speed without it, pair by pair. Empty for a plugin that was only measured
            together with others.
        kept: Whether the best recipe has it.
        why: Why it was not kept, or could not be measured.
        before: Seconds of a step without it, in each measurement.
        after: Seconds of a step with it, in each measurement.
        once: One-time cost in seconds: extra time of the start and the first steps, with nothing compiled yet.
        pays_after: Steps until it has saved its one-time cost; None: never.
    """

    edit: str
    plugin: str
    numerics: str
    estimate: float | None = None
    ratios: list[float] = field(default_factory=list)
    kept: bool = False
    why: str = ""
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    once: float = 0.0
    pays_after: int | None = None


@dataclass(frozen=True)
class Proposal:
    """A recipe to compare with the best one: with an edit, or without an edit that the best one has.

    Attributes:
        removes: Whether the recipe is the best one without the edit.
    """

    trial: Trial
    recipe: Recipe
    removes: bool = False

    @property
    def speedup(self) -> float:
        """Estimated speed of the recipe over that of the best one. A removal is expected to be slower."""
        estimate = max(self.trial.estimate or 1.0, 1.0)
        return 1 / estimate if self.removes else estimate


def decide(ratios: list[float], estimate: float = 0.0, pairs: int | None = None) -> bool | None:
    """Whether to keep an edit with these ratios; None: another pair is needed.

    Args:
        estimate: Estimated speedup. It replaces a second pair.
        pairs: Keep only edits that are significantly faster in this many pairs; None: decide clear cases after one
            pair.
    """
    if pairs is not None:
        slower = sum(ratio <= 1 for ratio in ratios)
        if slower > 1:
            return False
        return None if len(ratios) < pairs + MORE * slower else verdict(ratios) == "faster"
    if min(ratios) <= 1:
        return False
    if len(ratios) == 1:
        return True if ratios[0] >= CLEAR or min(ratios[0], estimate) >= WORTH else None
    if len(ratios) < PAIRS:
        return True if min(ratios) >= WORTH else None
    return median(ratios) >= LEAST


class Search:
    """One search.

    Args:
        accept: Numerics classes that edits may have.
        budget: Seconds that the search may take.
        shop: Runs the trainings.
        window: The measured part of each training.
        say: Called with a line of text for each result.
        never: Plugins not to try.
        pairs: Measure every edit in this many pairs, keep those that are significantly faster, and try only edits with
            an estimate; None: search as described above.

    Attributes:
        best: The fastest recipe so far.
        together: The recipe with all suggested edits of plugins against the given one; None: it was not measured.
        trials: All trials of one edit, in order.
        check: Comparison of the given recipe with the result: ``ratios`` and ``numerics``.
    """

    def __init__(
        self,
        recipe: Recipe,
        accept: Collection[str],
        budget: float,
        shop: TrialRunner,
        window: Window,
        say: Callable[[str], None],
        pairs: int | None = None,
        never: Collection[str] = (),
    ) -> None:
        self.pairs, self.never, self.given, self.best = pairs, set(never), recipe, recipe
        self.accept, self.budget, self.shop, self.window, self.say = accept, budget, shop, window, say
        self.together: Trial | None = None
        self.trials: list[Trial] = []
        self.check: dict[str, Any] = {"ratios": [], "numerics": None}
        self.started = monotonic()
        self.costs: dict[str, tuple[float, float]] = {}

    def run(self) -> Recipe:
        """Search; returns the fastest recipe.

        Raises:
            FastloopError: The given recipe cannot be measured.
        """
        self.shop.listen()
        here = self.measure(self.given)
        if "error" in here:
            raise (UsageError if here["kind"] == "usage" else FastloopError)(
                f"the recipe cannot be measured: {here['error']}"
            )
        rate, unit = speed(here)
        self.say(f"as given: {rate:,.1f} {unit}/s")
        if self.pairs is None:
            here = self.try_together(here)
        while (proposal := self.next(here)) is not None:
            if not proposal.removes:
                self.trials.append(proposal.trial)
            here = self.compare(proposal, here)
        self.hold()
        self.last_check()
        return self.best

    # -- what to try ---------------------------------------------------------------------------------------------------

    def next(self, here: Measurement) -> Proposal | None:
        """The next edit that fits into the remaining time; None if there is none."""
        tried = {trial.edit for trial in self.trials}
        refused = {trial.plugin for trial in self.trials if trial.estimate is not None and not trial.kept}
        for proposal in self.proposals(here):
            trial = proposal.trial
            again = not proposal.removes and (
                trial.edit in tried or (trial.estimate is not None and trial.plugin in refused)
            )
            if not again and trial.numerics in self.accept:
                if (missing := self.missing(proposal)) <= 0:
                    return proposal
                enough = (
                    ""
                    if self.trials
                    else f" before anything was tried: give at least --budget {self.budget + missing:.0f}s"
                )
                self.say(f"the time is over{enough}")
                return None
        return None

    def missing(self, proposal: Proposal) -> float:
        """Seconds that the budget lacks for an edit and the checks at the end; negative: it has them."""
        return self.cost(self.best, hoped=proposal.speedup) + self.reserve(max(proposal.speedup, 1.0)) - self.left()

    def suggestions(
        self, seen: StepProfile, recipe: Recipe, never: Collection[str]
    ) -> Iterator[tuple[Trial, Suggestion]]:
        """Yield the edits of a recipe for which plugins estimate a speedup, largest first."""
        for found in suggest(seen, recipe, never)[0]:
            factor = seen.seconds / max(seen.seconds - found.estimate.seconds, 0.01 * seen.seconds)
            yield Trial(found.edit, found.plugin, found.numerics, factor), found

    def proposals(self, here: Measurement) -> Iterator[Proposal]:
        """Yield edits of the best recipe so far."""
        seen = StepProfile(**here["profile"])
        left_out = {trial.plugin for trial in self.trials if trial.kept and trial.estimate is None}
        for trial, suggestion in self.suggestions(seen, self.best, self.never | left_out):
            yield Proposal(trial, suggestion.recipe)
        if self.pairs is not None:
            return
        # the smallest estimate of those that were added at once is the most doubtful
        for trial in reversed(self.trials):
            if trial.kept and not trial.ratios and not trial.why:
                yield from self.possible(trial, {}, {trial.plugin: self.given.plugins.get(trial.plugin)}, removes=True)
        for name, options in self.given.plugins.items():
            if options is not False and self.best.plugins.get(name) not in (None, False):
                plugin = load_listed(self.given, name)
                # which estimates a speedup, and so makes runs faster
                if plugin.slot != "task" and plugin.estimate_speedup.__func__ is not Plugin.estimate_speedup.__func__:  # type: ignore[attr-defined]
                    yield from self.possible(Trial(f"--without {name}", name, plugin.numerics), {}, {name: False})
        whole = self.best.train.batch_size // seen.world_size
        size = self.best.train.micro_batch_size or whole
        for other in (size // 2, size * 2):
            if 1 <= other <= whole and whole % other == 0:
                edit = {"train.micro_batch_size": other}
                yield from self.possible(Trial(f"train.micro_batch_size={other}", "", "reassociated"), edit, {})

    def possible(
        self, trial: Trial, values: Mapping[str, Any], plugins: Mapping[str, Any], removes: bool = False
    ) -> Iterator[Proposal]:
        """Yield an edit of the best recipe; see ``edited``. Nothing, if the recipe cannot run then."""
        with suppress(UsageError):
            yield Proposal(trial, edited(self.best, values, plugins), removes)

    # -- trying --------------------------------------------------------------------------------------------------------

    def try_together(self, here: Measurement) -> Measurement:
        """Measure the given recipe with all suggested edits of plugins that have no one-time cost.

        Returns:
            The newest measurement of the recipe that is best afterwards.
        """
        parts: list[Trial] = []
        seen, recipe, found = StepProfile(**here["profile"]), self.best, True
        while found:
            added = self.never | {trial.plugin for trial in parts}
            found = False
            for trial, suggestion in self.suggestions(seen, recipe, added):
                estimate = suggestion.estimate
                # one that compiles would slow all
                if trial.numerics in self.accept and estimate.once <= ONCE and not estimate.overrides:
                    parts.append(trial)
                    recipe, found = suggestion.recipe, True
                    break
        if len(parts) < 2:
            return here
        numerics = max((trial.numerics for trial in parts), key=CLASSES.index)
        joint = Trial(f"{len(parts)} edits at once: {', '.join(trial.plugin for trial in parts)}", "", numerics)
        proposal = Proposal(joint, recipe)
        if self.missing(proposal) > 0:
            return here
        self.together = joint
        here = self.compare(proposal, here)
        if joint.kept:
            self.trials += [replace(trial, kept=True) for trial in parts]
        return here

    def compare(self, proposal: Proposal, here: Measurement) -> Measurement:
        """Compare the best recipe with another. Records the result in the trial, and continues with the better recipe.

        Returns:
            The newest measurement of the recipe that is best afterwards.
        """
        trial, base, other, decision = proposal.trial, here, here, None
        while decision is None:
            other = self.measure(proposal.recipe)
            if "error" in other:
                trial.why = other["error"]
                self.say(f"{trial.edit}{' left out' if proposal.removes else ''}: {trial.why}")
                return base
            without, with_ = (other, base) if proposal.removes else (base, other)
            if not trial.ratios:
                costs = [found["startup_seconds"] + found["warmup_extra_seconds"] for found in (with_, without)]
                trial.once = max(0.0, costs[0] - costs[1])
            trial.ratios.append(faster(with_, without))
            trial.before.append(without["seconds_a_step"])
            trial.after.append(with_["seconds_a_step"])
            decision = decide(trial.ratios, trial.estimate or 0.0, self.pairs)
            pair = self.cost(self.best) + self.cost(proposal.recipe)
            if decision is None and self.pairs is None and self.left() < pair + self.reserve():
                decision = proposal.removes  # no time for a close case: the best recipe stays
            if decision is None:
                base = self.measure(self.best)
                if "error" in base:
                    trial.why = f"the recipe without it failed: {base['error']}"
                    self.say(f"{trial.edit}: {trial.why}")
                    return here
        trial.pays_after = break_even(trial.once, median(trial.before) - median(trial.after))
        length = other["total_steps"]
        if (
            decision
            and trial.once > ONCE
            and length is not None
            and (trial.pays_after is None or trial.pays_after >= length)
        ):
            decision, trial.why = False, f"it costs {trial.once:.0f} s once, which {length} steps do not save"
        trial.kept = decision
        ratios = ", ".join(f"{ratio:.2f}" for ratio in trial.ratios)
        estimate = "" if trial.estimate is None else f" (estimate {trial.estimate:.2f})"
        pays = f", pays after {trial.pays_after} steps" if decision and trial.once > ONCE else ""
        self.say(f"{trial.edit}: x {ratios}{estimate}: {'kept' if decision else trial.why or 'not kept'}{pays}")
        if decision == proposal.removes:
            return base
        self.best = proposal.recipe
        return other

    def measure(self, recipe: Recipe, number: int = 0, profiles: bool = True) -> Measurement:
        """Measure a recipe in a process of its own."""
        window = self.window_of(recipe) if profiles else replace(self.window_of(recipe), profile_steps=0)
        found = self.shop.measure(recipe, window, number)
        if "error" not in found:
            step, took = found["seconds_a_step"], found["process_seconds"]
            trained = window.duration(step) + window.profile_steps * step
            self.costs[repr(recipe.to_dict())] = max(0.0, took - trained), step
        return found

    def window_of(self, recipe: Recipe) -> Window:
        """The measured part of a training: after one step of warm-up, if a step is known to take longer than a whole
        window."""
        step = self.costs.get(repr(recipe.to_dict()), (0.0, 0.0))[1]
        return replace(self.window, warmup=1) if step > self.window.seconds > 0 else self.window

    # -- checking ------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Compare losses by the weakest numerics class of the kept edits; undo all edits if they differ too much."""
        promises = {trial.numerics for trial in self.trials if trial.kept}
        if not promises:
            return
        listed = {
            plugin.numerics
            for recipe in (self.given, self.best)
            for plugin in resolve(recipe, any_machine=True).plugins
        }
        if "reduced-precision" in listed:  # in few bits another order of sums is far from 1e-5
            promises.add("reduced-precision")
        self.check["numerics"] = found = self.shop.held(self.given, self.best, max(promises, key=CLASSES.index), LOSSES)
        if found["verdict"] in (BROKEN, FAILED):
            self.undo(
                f"the losses are not those of the recipe as given ({found['verdict']}, "
                f"{found['difference'] or found['why']})"
            )

    def last_check(self) -> None:
        """Measure the given recipe and the result in turn; undo all edits if the result is slower."""
        if self.best is self.given:
            return
        ratios: list[float] = self.check["ratios"]
        kept = [trial for trial in self.trials if trial.kept]
        if len(kept) == 1 and len(kept[0].ratios) >= CHECKS:  # which were these two
            ratios += kept[0].ratios
        pair = self.cost(self.given) + self.cost(self.best)
        for number in range(len(ratios), CHECKS):
            if ratios and (self.left() < pair or (self.pairs is None and min(ratios) >= CLEAR)):
                break
            arms = [self.given, self.best] if number % 2 == 0 else [self.best, self.given]
            measured = {id(recipe): self.measure(recipe, number, profiles=False) for recipe in arms}
            ours, theirs = measured[id(self.best)], measured[id(self.given)]
            if error := ours.get("error") or theirs.get("error"):
                self.check["error"] = error
                break
            ratios.append(faster(ours, theirs))
        self.check |= {"interval": list(interval(ratios)), "verdict": verdict(ratios)} if ratios else {}
        if not ratios or median(ratios) < 1:
            self.undo(
                f"the last check failed: {self.check['error']}"
                if not ratios
                else "the last check found it no faster than as given"
            )

    def undo(self, why: str) -> None:
        """Return to the given recipe."""
        self.say(f"{why}: nothing is changed")
        self.best = self.given
        for trial in (*self.trials, *([self.together] if self.together else ())):
            if trial.kept:
                trial.kept, trial.why = False, f"undone: {why}"

    def left(self) -> float:
        """Seconds left in the budget."""
        return self.budget - (monotonic() - self.started)

    def cost(self, recipe: Recipe, steps: int | None = None, hoped: float = 1.0) -> float:
        """Seconds that a measurement of a recipe takes, or a run of ``steps`` steps, in a process of its own.

        Args:
            hoped: Expected speedup of its steps.
        """
        start, step = self.costs[repr(recipe.to_dict())]
        return start + (self.window_of(recipe).duration(step / hoped) if steps is None else steps * step / hoped)

    def reserve(self, hoped: float = 1.0) -> float:
        """Seconds needed for the checks at the end, if the best recipe becomes ``hoped`` times as fast: losses, and one
        pair."""
        given, best = self.given, self.best
        losses = self.cost(given, LOSSES) + self.cost(best, LOSSES, hoped)
        return losses + self.cost(best, hoped=hoped) + self.cost(given)

    def record(self) -> dict[str, Any]:
        """The results of the search, for the report."""
        return {
            "given": self.given.to_dict(),
            "found": self.best.to_dict(),
            "accept": sorted(self.accept, key=CLASSES.index),
            "budget_seconds": self.budget,
            "seconds": monotonic() - self.started,
            "together": asdict(self.together) if self.together else None,
            "trials": [asdict(trial) for trial in self.trials],
            "check": self.check,
            "foreign_load": {"before": self.shop.before, "worst": self.shop.worst},
        }
