"""Which rungs a ladder has, and the recipe that each of them runs. Nothing is measured here, and nothing loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fastloop.errors import UsageError, did_you_mean
from fastloop.hooks import PluginSet
from fastloop.plugin import Plugin, defaults
from fastloop.recipe import Recipe, make_recipe
from fastloop.registry import load_listed, make, resolve
from fastloop.state import AcceleratorDraft, DataLoaderDraft, OptimizerDraft

if TYPE_CHECKING:
    from fastloop.runtime.hardware import Machine

BASELINE = "baseline"


@dataclass
class Rung:
    """One set of plugins to be measured.

    Attributes:
        title: How tables call it.
        plugins: Those that are on, beside the task.
        kind: A ``step`` is compared with the rung before; ``without`` is the full set less one plugin, which the full set is compared with.
        before: Title of the rung that it is compared with; None for the baseline.
        adds: Plugins that it has and the rung before has not, or, for ``without``, the one that is left out.
        at_baseline: Whether the overrides that hold for the baseline alone hold.
        why_not: Why it is not measured; None when it is.
    """

    title: str
    plugins: tuple[str, ...]
    kind: Literal["baseline", "step", "without"] = "step"
    before: str | None = None
    adds: tuple[str, ...] = ()
    at_baseline: bool = False
    why_not: str | None = None

    @property
    def key(self) -> tuple[tuple[str, ...], bool]:
        """Rungs with the same key are the same work: measured once."""
        return self.plugins, self.at_baseline


@dataclass
class Ladder:
    """What is to be measured.

    Attributes:
        recipe: As loaded.
        baseline: The recipe with the overrides of the baseline.
        plugins: The plugins under test in the recipe's order, as objects; those that cannot be here are not among them.
        absent: Plugin -> why it cannot be measured on this machine.
        rungs: In order; the baseline is first.
    """

    recipe: Recipe
    baseline: Recipe
    plugins: dict[str, Plugin] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    rungs: list[Rung] = field(default_factory=list)

    def full(self) -> Rung:
        """The last step that can be measured."""
        return [rung for rung in self.rungs if rung.kind != "without" and rung.why_not is None][-1]

    def measured(self) -> list[Rung]:
        """The rungs to measure, each set of plugins once."""
        found: dict[Any, Rung] = {}
        for rung in self.rungs:
            if rung.why_not is None:
                found.setdefault(rung.key, rung)
        return list(found.values())


def with_only(recipe: Recipe, names: Iterable[str], **train: Any) -> dict[str, Any]:
    """A recipe as plain values that has the task, the plugins of these names, and nothing that is on by itself.

    Args:
        train: Keys of the ``train`` section to set.
    """
    tree = copy.deepcopy(recipe.to_dict())
    tree["train"] |= train
    wanted = set(names)
    plugins: dict[str, Any] = {}
    for name, options in recipe.plugins.items():
        if options is not False and (name in wanted or load_listed(recipe, name).slot == "task"):
            plugins[name] = options
    for name, point in defaults().items():
        if name not in plugins and point.load().slot != "task":
            plugins[name] = False
    tree["plugins"] = recipe.listed(plugins)
    return tree


def make_ladder(recipe: Recipe, baseline: Recipe, lifted: Sequence[str], sets: Sequence[Sequence[str]], leave_one_out: bool) -> Ladder:
    """The rungs of a recipe.

    Args:
        baseline: The recipe with the overrides ``lifted``, which hold for the baseline alone.
        sets: Sets of plugins to go through in place of the recipe's list, which is added up one by one.

    Raises:
        UsageError: The recipe cannot run as a whole, for another reason than this machine.
    """
    from fastloop.runtime.hardware import this_machine

    ladder, machine = Ladder(recipe, baseline), this_machine(recipe.train.device)
    tested = list(_tested(recipe))
    for name in tested:
        plugin = make(recipe, name)
        why = _missing(plugin, machine)
        if why is None:
            ladder.plugins[name] = plugin
        else:
            ladder.absent[name] = why
    for wanted in (name for names in sets for name in names if name not in tested):
        raise UsageError(f"--ladder: {wanted!r} is no plugin that can be put to the test here.{did_you_mean(wanted, tested)}")
    if not tested:
        raise UsageError(f"{recipe.where}: lists no plugin to measure. Add some: --with A,B. `fastloop plugins` lists them.")
    resolution = check(make_recipe(with_only(baseline, ()), recipe.source))
    if not ladder.absent and not sets:
        resolution = check(make_recipe(with_only(recipe, tested), recipe.source))  # what is wrong with the whole is wrong with the recipe
    resolution.hooks.check_recipe(recipe=recipe)

    ladder.rungs.append(Rung(BASELINE, (), "baseline", at_baseline=bool(lifted)))
    if lifted:
        ladder.rungs.append(Rung(f"without {' '.join(lifted)}", (), before=BASELINE))
    have: tuple[str, ...] = ()
    for names in sets or [tested[: index + 1] for index in range(len(tested))]:
        here = tuple(name for name in tested if name in names)
        before, added = ladder.full(), tuple(name for name in here if name not in have)
        grows = set(have) <= set(here)
        rung = Rung(" ".join(f"+ {name}" for name in added) if grows and added else ", ".join(here) or "no plugins", here, adds=added)
        have = here
        missing = [name for name in added if name in ladder.absent] if not sets else [name for name in here if name in ladder.absent]
        if not sets:
            rung.plugins = tuple(name for name in here if name not in ladder.absent)
        rung.why_not = "; ".join(ladder.absent[name] for name in missing) or unresolvable(ladder, rung.plugins)
        rung.before = before.title
        ladder.rungs.append(rung)
    if any(rung.title == other.title for index, rung in enumerate(ladder.rungs) for other in ladder.rungs[:index]):
        raise UsageError("--ladder: the same set of plugins is there twice in a row. Remove one.")
    full = ladder.full()
    if leave_one_out and len(full.plugins) > 1:
        for name in full.plugins:
            others = tuple(other for other in full.plugins if other != name)
            ladder.rungs.append(Rung(f"all but {name}", others, "without", full.title, (name,), why_not=unresolvable(ladder, others)))
    return ladder


def closure(ladder: Ladder, name: str) -> tuple[str, ...]:
    """The plugins under test that a plugin cannot do without, in order, itself not among them."""
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        for reference in ladder.plugins[waiting.pop()].requires:
            kind, colon, slot = reference.partition(":")
            for other, plugin in ladder.plugins.items():
                found = plugin.slot == slot if colon and kind == "slot" else other == reference
                if found and other not in needed and other != name:
                    needed.add(other)
                    waiting.append(other)
    return tuple(other for other in ladder.plugins if other in needed)


def unresolvable(ladder: Ladder, names: Sequence[str]) -> str | None:
    """Why plugins cannot run together and without others; None: they can."""
    try:
        check(make_recipe(with_only(ladder.recipe, names), ladder.recipe.source))
    except UsageError as error:
        return str(error).removeprefix(f"{ladder.recipe.where}: ")
    return None


def check(recipe: Recipe) -> PluginSet:
    """Resolve a recipe, and have its plugins write their drafts, which may contradict each other.

    Raises:
        UsageError: It cannot run.
    """
    resolution = resolve(recipe)
    for hook, draft in (
        ("configure_accelerator", AcceleratorDraft()),
        ("configure_dataloader", DataLoaderDraft()),
        ("configure_optimizer", OptimizerDraft()),
    ):
        resolution.draft(hook, draft)
    return resolution


def _tested(recipe: Recipe) -> Iterator[str]:
    """What the recipe lists, less its task and what is on by itself."""
    ours = defaults()
    for name, options in recipe.plugins.items():
        if options is not False and name not in ours and load_listed(recipe, name).slot != "task":
            yield name


def _missing(plugin: Plugin, machine: Machine) -> str | None:
    """What a plugin needs and this machine has not."""
    found = next((missing for need in plugin.needs if (missing := need.missing(plugin, machine))), None)
    return None if found is None else f"not measurable here: {plugin.name} {found}"
