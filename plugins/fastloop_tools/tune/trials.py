"""Edits of a recipe that a search tries, and the rule that decides which are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastloop.plugins.plugin import Plugin
from fastloop.recipe import Recipe
from fastloop_tools.trials.results import Measurement
from fastloop_tools.trials.statistics import interval, median, verdict

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

    @property
    def interval(self) -> tuple[float, float]:
        """95% bootstrap interval of the median ratio."""
        return interval(self.ratios)


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


def first_cost(found: Measurement) -> float:
    """Seconds before the first step, and the extra seconds of the first steps."""
    return float(found["startup_seconds"] + found["warmup_extra_seconds"])


def for_speed(plugin: type[Plugin]) -> bool:
    """Whether a plugin makes runs faster, that is, whether it estimates a speedup."""
    return plugin.estimate_speedup.__func__ is not Plugin.estimate_speedup.__func__  # type: ignore[attr-defined]
