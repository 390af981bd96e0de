"""Selects the plugins that make a recipe faster on this machine.

    plugins:
      - auto

Each plugin's rule, its method ``recommend``, decides by device, dtypes, number of processes, task and model. It
measures nothing; `fastloop bench --select` does. `fastloop plan` shows the reasons. Plugins that the recipe turns off
(``packing: false``, ``--without packing``) stay off.

`fastloop predict` and `fastloop evaluate` add it with ``numerics: reassociated`` to recipes that do not list it.

While the run is built, a selected plugin that fails, or with which the loss, gradients or predictions of two samples
fail, is left out with a warning. ``numerics: changes-training`` also permits plugins that group samples by length.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from fastloop import Plugin, PluginError, Recommendation, hookimpl, option
from fastloop.plugins.plugin import Numerics

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine

logger = logging.getLogger("fastloop")

EFFECTS: tuple[str, ...] = get_args(Numerics)
"""The numerics classes, from the smallest effect to the largest."""


class Auto(Plugin):
    """Replaces itself in the recipe by plugins that speed up training on this machine."""

    name = "auto"
    numerics = "reduced-precision"
    description = "selects the plugins that pay on this machine"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        numerics: Numerics = option(
            "The largest effect on the numbers that a selected plugin may have.", default="reduced-precision"
        )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.numerics = self.config.numerics  # type: ignore[assignment, misc]

    def select_plugins(self, recipe: Recipe, machine: Machine) -> dict[str, Recommendation]:
        """Ask each plugin of fastloop. A plugin that does not combine with the ones before it is left out."""
        from fastloop.plugins.installed import load
        from fastloop.plugins.resolve import resolve
        from fastloop_plugins._own_plugins import own_plugins

        candidates = [load(name) for name in sorted(own_plugins()) if name not in recipe.plugins and name != self.name]
        candidates = [cls for cls in candidates if EFFECTS.index(cls.numerics) <= EFFECTS.index(self.config.numerics)]
        if recipe.inference is not None:
            candidates = [cls for cls in candidates if cls.for_inference]
        # plugins that arrange the data come first: rules of others read it
        candidates.sort(key=lambda cls: -EFFECTS.index(cls.numerics))
        chosen: dict[str, Recommendation] = {}
        plugins = {name: options for name, options in recipe.plugins.items() if name != self.name}
        problem = self._problem(dataclasses.replace(recipe, plugins=dict(plugins), selected={}))
        for cls in candidates:
            trial = dataclasses.replace(recipe, plugins=dict(plugins), selected={})
            found = cls.recommend(trial, machine)
            if found is None or any(need.missing(cls(**found.options), machine) for need in cls.requirements):
                continue
            trial.plugins[cls.name] = dict(found.options)
            try:
                resolve(trial, any_machine=True)
            except PluginError as error:
                if str(error) != problem:
                    logger.info("auto: leaves out %s: %s", cls.name, error)
                continue
            plugins, chosen[cls.name] = trial.plugins, found
        final = dataclasses.replace(recipe, plugins=plugins, selected={})
        return {name: again for name in chosen if (again := recommend_beside(final, name, machine)) is not None}

    def build_selected(self, resolved: ResolvedRecipe, build: Callable[[Run], Run]) -> Run:
        """Leave out plugins that fail with the run's model."""
        from fastloop_plugins._selection import SelectedBuild

        return SelectedBuild(resolved, build).run()

    def _problem(self, recipe: Recipe) -> str:
        """The error of a recipe's own plugins; empty if there is none. It is reported when the recipe is resolved."""
        from fastloop.plugins.resolve import resolve

        try:
            resolve(recipe, any_machine=True)
        except PluginError as error:
            return str(error)
        return ""

    @hookimpl
    def check_run(self, run: Run) -> None:
        logger.warning("auto: no plugin of fastloop is known to make this recipe faster on %s", run.device.type)


def recommend_beside(recipe: Recipe, name: str, machine: Machine) -> Recommendation | None:
    """The recommendation for a plugin beside the others that a recipe lists. Its options may depend on them."""
    from fastloop.plugins.resolve import load_listed

    others = {other: options for other, options in recipe.plugins.items() if other != name}
    return load_listed(recipe, name).recommend(dataclasses.replace(recipe, plugins=others, selected={}), machine)
