"""Derives recipe edits from a profile, ordered by the seconds that they save."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from fastloop.errors import UsageError
from fastloop.plugins.installed import load
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import load_listed
from fastloop.recipe import Recipe
from fastloop.runtime.hardware import this_machine
from fastloop.speedup_estimates import SpeedupEstimate, StepProfile
from fastloop_plugins._own_plugins import own_plugins
from fastloop_tools.shared.changed_recipes import edited
from fastloop_tools.trials.statistics import break_even

WORTH = 0.03
"""Share of a step that an estimate must reach to be shown."""
ABOUT_ONE = 1.1
"""Estimated speedup below which no figure is shown. Three of four such estimates had the wrong sign in
``benchmarks/planted.py``."""


@dataclass(frozen=True)
class Suggestion:
    """One edit of a recipe, as a user would type it, and the recipe with it. ``plugin`` made the estimate."""

    plugin: str
    estimate: SpeedupEstimate
    edit: str
    recipe: Recipe = field(repr=False)
    numerics: str = "bitwise"


def suggest(
    profile: StepProfile, recipe: Recipe, never: Collection[str] = ()
) -> tuple[list[Suggestion], dict[str, str]]:
    """The edits worth trying, largest estimate first; and plugins that would be faster but cannot run -> why. Plugins
    that are false in the recipe may be suggested, those of ``never`` not."""
    edits = []
    refused = {}
    on = dataclasses.replace(
        recipe, plugins={name: options for name, options in recipe.plugins.items() if options is not False}
    )
    for cls in candidates(on):
        estimate = cls.estimate_speedup(profile, on) if cls.name not in never else None
        if estimate is None or estimate.seconds < WORTH * profile.seconds:
            continue
        pays = break_even(estimate.once, estimate.seconds)
        if pays is not None and profile.total_steps is not None and pays >= profile.total_steps:
            refused[cls.name] = (
                f"it costs about {estimate.once:.0f} s once, and the recipe has too few steps ({profile.total_steps}) "
                "to save them."
            )
            continue
        try:
            new = edit(recipe, cls, estimate)
        except UsageError as error:
            refused[cls.name] = str(error).removeprefix(f"{recipe.where}: ")
            continue
        numerics = "reassociated" if estimate.overrides else cls.numerics
        edits.append(Suggestion(cls.name, estimate, words(on, cls, estimate), new, numerics))
    return sorted(edits, key=lambda suggestion: -suggestion.estimate.seconds), refused


def speedup(profile: StepProfile, estimate: SpeedupEstimate) -> float:
    """The estimated speedup of a step; at most 100."""
    return profile.seconds / max(profile.seconds - estimate.seconds, 0.01 * profile.seconds)


def show_speedup(factor: float) -> str:
    """An estimated speedup as text: ``1.25``, or ``about 1``."""
    return "about 1" if factor < ABOUT_ONE else f"{factor:.2f}"


def candidates(recipe: Recipe) -> Iterator[type[Plugin]]:
    """fastloop's own plugins and those of the recipe. Other packages are not imported for an estimate."""
    for name in own_plugins():
        if name not in recipe.plugins:
            yield load(name, recipe.where)
    for name in recipe.plugins:
        yield load_listed(recipe, name)


def edit(recipe: Recipe, cls: type[Plugin], estimate: SpeedupEstimate) -> Recipe:
    """The recipe with a plugin added, its options changed, or keys set.

    Raises:
        UsageError: It cannot run, or the plugin cannot run on this machine.
    """
    if estimate.overrides:
        return edited(recipe, estimate.overrides, {})
    options = {**(recipe.plugins.get(cls.name) or {}), **estimate.options}
    plugin = cls(**options)
    machine = this_machine(recipe.train.device)
    for need in cls.requirements:
        missing = need.missing(plugin, machine)
        if missing:
            raise UsageError(missing, code="requirement-missing")
    return edited(recipe, {}, {cls.name: options})


def words(recipe: Recipe, cls: type[Plugin], estimate: SpeedupEstimate) -> str:
    """The edit as a user would type it: overrides on the command line, or a line in ``plugins``."""
    if estimate.overrides:
        return " ".join(f"{key}={value}" for key, value in estimate.overrides.items())
    if cls.name in recipe.plugins:
        return " ".join(f"plugins.{cls.name}.{key}={value}" for key, value in estimate.options.items())
    options = ", ".join(f"{key}: {value}" for key, value in estimate.options.items())
    return f"plugins: + {cls.name}" + (f": {{{options}}}" if options else "")
