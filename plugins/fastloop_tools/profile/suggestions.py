"""Derives recipe edits from a profile, ordered by the seconds that they save."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastloop.errors import UsageError
from fastloop.estimates import SpeedupEstimate, StepProfile
from fastloop.plugins.installed import load
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import load_listed
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime.hardware import this_machine
from fastloop_plugins._own_plugins import own_plugins
from fastloop_tools.bench.plan import check
from fastloop_tools.trials.statistics import break_even

WORTH = 0.03
"""Share of a step that an estimate must reach to be shown."""


@dataclass(frozen=True)
class Suggestion:
    """One edit of a recipe.

    Attributes:
        plugin: Name of the plugin that made the estimate.
        estimate: The estimate.
        edit: The edit as a user would type it.
        recipe: The edited recipe.
        numerics: The plugin's numerics class.
    """

    plugin: str
    estimate: SpeedupEstimate
    edit: str
    recipe: Recipe = field(repr=False)
    numerics: str = "bitwise"


def suggest(
    profile: StepProfile, recipe: Recipe, never: Collection[str] = ()
) -> tuple[list[Suggestion], dict[str, str]]:
    """The edits worth trying, largest estimate first; and plugins that would be faster but cannot run -> why.

    Args:
        never: Plugins not to suggest. Plugins that are false in the recipe may be suggested.
    """
    found, refused = [], {}
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
            edited = edit(recipe, cls, estimate)
            check(edited)
        except UsageError as error:
            refused[cls.name] = str(error).removeprefix(f"{recipe.where}: ")
            continue
        numerics = "reassociated" if estimate.overrides else cls.numerics
        found.append(Suggestion(cls.name, estimate, words(on, cls, estimate), edited, numerics))
    return sorted(found, key=lambda suggestion: -suggestion.estimate.seconds), refused


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
        UsageError: The plugin cannot run on this machine.
    """
    tree = copy.deepcopy(recipe.to_dict())
    plugins: dict[str, Any] = dict(recipe.plugins)
    if estimate.overrides:
        for key, value in estimate.overrides.items():
            *parents, last = key.split(".")
            section: Any = tree
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
    else:
        plugin = cls(**{**(plugins.get(cls.name) or {}), **estimate.options})
        machine = this_machine(recipe.train.device)
        for need in cls.requirements:
            if missing := need.missing(plugin, machine):
                raise UsageError(missing)
        plugins[cls.name] = {**(plugins.get(cls.name) or {}), **estimate.options}
        tree["plugins"] = recipe.listed(plugins)
    return make_recipe(tree, recipe.source)


def words(recipe: Recipe, cls: type[Plugin], estimate: SpeedupEstimate) -> str:
    """The edit as a user would type it: overrides on the command line, or a line in ``plugins``."""
    if estimate.overrides:
        return " ".join(f"{key}={value}" for key, value in estimate.overrides.items())
    if cls.name in recipe.plugins:
        return " ".join(f"plugins.{cls.name}.{key}={value}" for key, value in estimate.options.items())
    return f"plugins: + {cls.name}" + (f": {{{_options(estimate.options)}}}" if estimate.options else "")


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items())
