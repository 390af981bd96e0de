"""Selects the plugins that make a recipe faster on this machine.

    plugins:
      - auto

Each plugin's rule, its method ``recommend``, decides by device, dtypes, number of processes, task and model. It
measures nothing; `fastloop bench --select` does. `fastloop plan` shows the reasons. Plugins that the recipe turns off
(``packing: false``, ``--without packing``) stay off.

It asks the plugins of fastloop and of the packages that are released with it, such as ``fastloop-cpu``, and those of
the packages that the recipe names: ``auto: {packages: [speedy-kernels]}``. The name of a plugin's distribution decides.
It asks plugins of other packages last. If one of them changes a choice of ``auto``, or replaces a plugin that is on by
default, it logs a warning.

`fastloop predict` and `fastloop evaluate` add it with ``numerics: reassociated`` to recipes that do not list it.

While the run is built, a selected plugin that fails, or with which the loss, gradients or predictions of two samples
fail, is left out with a warning. ``numerics: changes-training`` also permits plugins that group samples by length.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from fastloop import Plugin, PluginError, Problem, Recommendation, hookimpl, option
from fastloop.plugins.plugin import Numerics
from fastloop.problem import typed_clause

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine

logger = logging.getLogger("fastloop")

CPU_EXTRA = "cpu"
"""The extra of fastloop that brings plugins for a CPU."""
EFFECTS: tuple[str, ...] = get_args(Numerics)
"""The numerics classes, from the smallest effect to the largest."""


class Auto(Plugin):
    """Selects the plugins that pay on this machine, and replaces itself in the recipe by them."""

    name = "auto"
    numerics = "reduced-precision"

    largest_effect: Numerics = option(
        "The largest effect on the numbers that a selected plugin may have.",
        default="reduced-precision",
        key="numerics",
    )
    packages: list[str] = option("Names of further packages whose plugins may be selected.", default_factory=list)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.numerics = self.largest_effect  # type: ignore[assignment, misc]

    def select_plugins(self, recipe: Recipe, machine: Machine) -> dict[str, Recommendation]:
        """Ask each plugin of fastloop, and then each plugin of the packages that the recipe names.

        A plugin that does not combine with the ones before it is left out. So a plugin of a package that excludes one
        of fastloop's is left out, too; if it changes the choice of one in another way, ``auto`` logs a warning.
        """
        from fastloop_plugins._own_plugins import own_plugins, plugins_of_packages

        packages = plugins_of_packages(self.packages, f"{recipe.place(self.name)}.packages")
        own = [name for name in sorted(own_plugins()) if name not in packages]
        selection = PluginSelection(recipe, self.name, machine)
        for cls in self._candidates(own, recipe):
            selection.ask(cls)
        for cls in self._candidates(packages, recipe):
            before = selection.chosen()
            selection.ask_stranger(cls, packages[cls.name])
            warn_of_changes(before, selection.chosen(), f"{cls.name} of {packages[cls.name]}")
        suggest_package(recipe, machine)
        return selection.chosen()

    def _candidates(self, names: Iterable[str], recipe: Recipe) -> list[type[Plugin]]:
        """The plugins to ask, in order: those with the largest effect on the numbers arrange the data, which rules of
        others read."""
        from fastloop.plugins.installed import load

        candidates = []
        for name in names:
            if name in recipe.plugins or name == self.name:
                continue
            cls = load(name)
            is_permitted = EFFECTS.index(cls.numerics) <= EFFECTS.index(self.largest_effect)
            if is_permitted and (recipe.inference is None or cls.for_inference):
                candidates.append(cls)
        return sorted(candidates, key=lambda cls: -EFFECTS.index(cls.numerics))

    def build_selected(self, resolved: ResolvedRecipe, build: Callable[[Run], Run]) -> Run:
        """Leave out plugins that fail with the run's model."""
        from fastloop_plugins._selection import SelectedBuild

        return SelectedBuild(resolved, build).run()

    @hookimpl
    def check_run(self, run: Run) -> None:
        self.log.warning(
            Problem(
                f"no plugin of fastloop is known to make this recipe faster on {run.device.type}.",
                code="nothing-selected",
            )
        )


class PluginSelection:
    """The plugins that ``auto`` has selected so far, beside those that a recipe lists.

    Args:
        recipe: The recipe, which stays as it is.
        selector: The name of ``auto`` in it, which the selected plugins replace.
    """

    def __init__(self, recipe: Recipe, selector: str, machine: Machine) -> None:
        listed = {name: options for name, options in recipe.plugins.items() if name != selector}
        self.recipe = dataclasses.replace(recipe, plugins=listed, selected={})
        self.machine = machine
        self.names: list[str] = []
        self.problem = problem_of(self.recipe)
        """The error of the recipe's own plugins. It is reported when the recipe is resolved."""

    def chosen(self) -> dict[str, Recommendation]:
        """Each selected plugin with its recommendation beside all others, on which its options may depend. A plugin
        that has none beside them is left out."""
        recommendations = {}
        for name in self.names:
            recommendation = recommend_beside(self.recipe, name, self.machine)
            if recommendation is not None:
                recommendations[name] = recommendation
        return recommendations

    def ask(self, cls: type[Plugin]) -> None:
        """Select a plugin if it recommends itself and combines with the plugins before it."""
        if self._lists_another(cls):
            return
        recommendation = cls.recommend(copy_of(self.recipe), self.machine)
        if recommendation is None or not self._is_met(cls, recommendation):
            return
        trial = self._with(cls, recommendation)
        problem = problem_of(trial)
        if not problem:
            self.recipe = trial
            self.names.append(cls.name)
        elif problem != self.problem:
            logger.info("auto: leaves out %s: %s", cls.name, problem)

    def ask_stranger(self, cls: type[Plugin], package: str) -> None:
        """Select a plugin of another package likewise. A rule that fails leaves it out with a warning; so do options
        that the plugin refuses. A warning says if the rule changes the recipe that it reads, which has no effect, or
        if the plugin replaces one that is on by default."""
        shown = copy_of(self.recipe)
        try:
            recommendation = cls.recommend(shown, self.machine)
            if recommendation is None or not self._is_met(cls, recommendation):
                return
            trial = self._with(cls, recommendation)
        except Exception as error:
            logger.warning(
                Problem(
                    f"leaves out {cls.name} of {package}: its rule failed: {typed_clause(error)}.",
                    code="rule-failed",
                    place="auto",
                )
            )
            return
        finally:
            if shown != self.recipe:
                logger.warning(
                    Problem(
                        f"the rule of {cls.name} of {package} changes the recipe that it reads. The change has no "
                        "effect.",
                        code="rule-failed",
                        place="auto",
                    )
                )
        problem = problem_of(trial)
        if problem:
            logger.info("auto: leaves out %s of %s: %s", cls.name, package, problem)
            return
        for name in replaced_defaults(self.recipe, trial):
            logger.warning(
                Problem(
                    f"{cls.name} of {package} replaces {name!r}, which is on by default.",
                    code="default-replaced",
                    place="auto",
                )
            )
        self.recipe = trial
        self.names.append(cls.name)

    def _lists_another(self, cls: type[Plugin]) -> bool:
        """Whether the recipe lists another plugin for the same purpose, such as `fsdp` instead of `ddp`."""
        from fastloop.plugins.resolve import load_listed

        if cls.slot is None or self.problem:
            return False
        for name, options in self.recipe.plugins.items():
            if options is not False and name not in self.names and load_listed(self.recipe, name).slot == cls.slot:
                return True
        return False

    def _is_met(self, cls: type[Plugin], recommendation: Recommendation) -> bool:
        """Whether the machine and the installed packages meet the requirements of a plugin."""
        plugin = cls(**recommendation.options)
        return all(need.missing(plugin, self.machine) is None for need in cls.requirements)

    def _with(self, cls: type[Plugin], recommendation: Recommendation) -> Recipe:
        """The recipe with a further plugin."""
        plugins = {**self.recipe.plugins, cls.name: dict(recommendation.options)}
        return dataclasses.replace(self.recipe, plugins=plugins)


def copy_of(recipe: Recipe) -> Recipe:
    """A copy of a recipe for a rule to read: a change of it has no effect on the recipe."""
    sections = {name: copy.deepcopy(getattr(recipe, name)) for name in ("model", "data", "train", "plugins")}
    return dataclasses.replace(recipe, **sections)


def problem_of(recipe: Recipe) -> str:
    """The error of the plugins of a recipe; empty if there is none."""
    from fastloop.plugins.resolve import resolve

    try:
        resolve(recipe, any_machine=True)
    except PluginError as error:
        return str(error)
    return ""


def replaced_defaults(before: Recipe, after: Recipe) -> list[str]:
    """The plugins of a recipe that are not in the run of another one: default plugins, whose slots are filled there."""
    from fastloop.plugins.resolve import resolve

    remaining = resolve(after, any_machine=True).plugins.names()
    try:
        names = resolve(before, any_machine=True).plugins.names()
    except PluginError:  # it is reported when the recipe is resolved
        return []
    return [name for name in names if name not in remaining]


def warn_of_changes(before: Mapping[str, Recommendation], after: Mapping[str, Recommendation], who: str) -> None:
    """Log each choice of ``auto`` that is another one beside a plugin of another package."""
    for name, recommendation in before.items():
        if name not in after:
            logger.warning(Problem(f"{name} is not selected beside {who}.", code="selection-differs", place="auto"))
        elif after[name].options != recommendation.options:
            now = dict(after[name].options)
            then = dict(recommendation.options)
            logger.warning(
                Problem(
                    f"beside {who}, {name} gets the options {now}, without it {then}.",
                    code="selection-differs",
                    place="auto",
                )
            )


def suggest_package(recipe: Recipe, machine: Machine) -> None:
    """Name the package that has more plugins for a CPU, if it is not installed."""
    from fastloop.plugins.declarations import warn_once
    from fastloop.plugins.packages import PACKAGES
    from fastloop_plugins.models.wrapped import model_type

    if machine.device != "cpu" or model_type(recipe) is None:
        return
    for package in PACKAGES:
        if package.extra == CPU_EXTRA and not importlib.util.find_spec(package.distribution.replace("-", "_")):
            warn_once(
                Problem(
                    f"the package {package.distribution} makes this model faster on a CPU.",
                    code="faster-package",
                    place="auto",
                    remedy="Install it:",
                    command=package.install,
                )
            )


def recommend_beside(recipe: Recipe, name: str, machine: Machine) -> Recommendation | None:
    """The recommendation for a plugin beside the others that a recipe lists. Its options may depend on them."""
    from fastloop.plugins.resolve import load_listed

    others = {other: options for other, options in recipe.plugins.items() if other != name}
    beside = dataclasses.replace(recipe, plugins=others, selected={})
    return load_listed(recipe, name).recommend(copy_of(beside), machine)
