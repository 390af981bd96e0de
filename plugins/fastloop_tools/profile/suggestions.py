"""From what was seen to recipe edits, in the order of the seconds that they would win back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastloop.errors import UsageError
from fastloop.estimates import SpeedupEstimate, StepProfile
from fastloop.plugin import Plugin
from fastloop.recipe import Recipe, make_recipe
from fastloop.registry import installed, load, load_listed
from fastloop.runtime.hardware import this_machine
from fastloop_tools.bench.plan import check
from fastloop_tools.measure.statistics import break_even

WORTH = 0.03
"""Share of a step that a estimate must reach to be told."""


@dataclass(frozen=True)
class Suggestion:
    """One edit.

    Attributes:
        plugin: Whose estimate it is.
        win: The estimate.
        edit: As one would type it.
        recipe: With the edit made.
        numerics: The plugin's class.
    """

    plugin: str
    win: SpeedupEstimate
    edit: str
    recipe: Recipe = field(repr=False)
    numerics: str = "bitwise"


def suggest(seen: StepProfile, recipe: Recipe, never: Collection[str] = ()) -> tuple[list[Suggestion], dict[str, str]]:
    """The edits worth a try, the largest estimate first; and plugins that would win and cannot be here -> why.

    Args:
        never: Plugins that nobody wants. What the recipe itself has as false is off, and may be turned on.
    """
    found, refused = [], {}
    on = dataclasses.replace(recipe, plugins={name: options for name, options in recipe.plugins.items() if options is not False})
    for cls in candidates(on):
        win = cls.estimate_speedup(seen, on) if cls.name not in never else None
        if win is None or win.seconds < WORTH * seen.seconds:
            continue
        pays = break_even(win.once, win.seconds)
        if pays is not None and seen.total_steps is not None and pays >= seen.total_steps:
            refused[cls.name] = f"it costs about {win.once:.0f} s once, and the recipe has {seen.total_steps} steps to win them back."
            continue
        try:
            edited = edit(recipe, cls, win)
            check(edited)
        except UsageError as error:
            refused[cls.name] = str(error).removeprefix(f"{recipe.where}: ")
            continue
        found.append(Suggestion(cls.name, win, words(on, cls, win), edited, cls.numerics if not win.overrides else "reassociated"))
    return sorted(found, key=lambda verdict: -verdict.win.seconds), refused


def candidates(recipe: Recipe) -> Iterator[type[Plugin]]:
    """fastloop's own plugins, and the recipe's: no other package is imported for a estimate."""
    for name, point in installed().items():
        if name not in recipe.plugins and point.dist is not None and point.dist.name == "fastloop" and name == point.name:
            yield load(name, recipe.where)
    for name in recipe.plugins:
        yield load_listed(recipe, name)


def edit(recipe: Recipe, cls: type[Plugin], win: SpeedupEstimate) -> Recipe:
    """The recipe with a plugin added or its options changed, or with keys set.

    Raises:
        UsageError: The plugin cannot be on this machine.
    """
    tree = copy.deepcopy(recipe.to_dict())
    plugins: dict[str, Any] = dict(recipe.plugins)
    if win.overrides:
        for key, value in win.overrides.items():
            *parents, last = key.split(".")
            place: Any = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
    else:
        plugin = cls(**{**(plugins.get(cls.name) or {}), **win.options})
        machine = this_machine(recipe.train.device)
        for need in cls.requirements:
            if missing := need.missing(plugin, machine):
                raise UsageError(missing)
        plugins[cls.name] = {**(plugins.get(cls.name) or {}), **win.options}
        tree["plugins"] = recipe.listed(plugins)
    return make_recipe(tree, recipe.source)


def words(recipe: Recipe, cls: type[Plugin], win: SpeedupEstimate) -> str:
    """The edit as one would make it: overrides of the command line, or a line of ``plugins``."""
    if win.overrides:
        return " ".join(f"{key}={value}" for key, value in win.overrides.items())
    if cls.name in recipe.plugins:
        return " ".join(f"plugins.{cls.name}.{key}={value}" for key, value in win.options.items())
    return f"plugins: + {cls.name}" + (f": {{{_options(win.options)}}}" if win.options else "")


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items())
