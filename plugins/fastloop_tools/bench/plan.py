"""Plans the variants of an ablation, and the recipe of each. Measures nothing and loads no model or data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastloop.errors import UsageError, did_you_mean
from fastloop.plugins.installed import defaults
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import expand, load_listed, make
from fastloop.recipe import Recipe, make_recipe
from fastloop_tools.shared.changed_recipes import check, with_only


@dataclass
class Variant:
    """One set of plugins to measure, besides the task. Variants with the same plugins are measured once.

    Attributes:
        kind: A ``step`` is compared with the variant before. ``without`` is the full set without one plugin; the full
            set is compared with it.
        before: Title of the variant that it is compared with.
        adds: Plugins that the variant before does not have; for ``without``, the plugin that is removed.
        why_not: Why it is not measured; None if it is.
    """

    title: str
    plugins: tuple[str, ...]
    kind: Literal["baseline", "step", "without"] = "step"
    before: str | None = None
    adds: tuple[str, ...] = ()
    why_not: str | None = None


@dataclass
class Ablation:
    """The variants to measure, the baseline first. ``plugins`` are the tested ones that can run on this machine, in the
    recipe's order; ``absent`` are the others, with the reason."""

    recipe: Recipe
    plugins: dict[str, Plugin] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)

    def full(self) -> Variant:
        """The last step that can be measured."""
        return [variant for variant in self.variants if variant.kind != "without" and variant.why_not is None][-1]

    def measured(self) -> list[Variant]:
        """The variants to measure, each set of plugins once."""
        by_plugins: dict[tuple[str, ...], Variant] = {}
        for variant in self.variants:
            if variant.why_not is None:
                by_plugins.setdefault(variant.plugins, variant)
        return list(by_plugins.values())


def make_ablation(recipe: Recipe, sets: Sequence[Sequence[str]], leave_one_out: bool) -> Ablation:
    """Plan the variants of a recipe.

    Args:
        sets: Sets of plugins to measure, instead of adding the recipe's plugins one by one.

    Raises:
        UsageError: The recipe cannot run, for a reason other than this machine.
    """
    recipe = expand(recipe)
    ablation = Ablation(recipe)
    tested = list(_tested(recipe))
    _load_plugins(ablation, tested)
    _check_names(recipe, tested, sets)
    # an error in the full set is an error in the recipe
    all_of_them = () if ablation.absent or sets else tested
    resolved = check(make_recipe(with_only(recipe, all_of_them), recipe.source))
    resolved.plugins.hooks.check_recipe(recipe=recipe, plugins=resolved.plugins)

    ablation.variants.append(Variant("baseline", (), "baseline"))
    if sets:
        _add_given_sets(ablation, tested, sets)
    else:
        _add_one_by_one(ablation, tested)
    full = ablation.full()
    if leave_one_out and len(full.plugins) > 1:
        for name in full.plugins:
            others = tuple(plugin for plugin in full.plugins if plugin != name)
            why_not = unresolvable(ablation, others)
            ablation.variants.append(Variant(f"all but {name}", others, "without", full.title, (name,), why_not))
    return ablation


def _load_plugins(ablation: Ablation, tested: Sequence[str]) -> None:
    """Fill ``plugins`` and ``absent`` of an ablation."""
    from fastloop.runtime.hardware import this_machine

    machine = this_machine(ablation.recipe.train.device)
    for name in tested:
        plugin = make(ablation.recipe, name)
        missing = None
        for requirement in plugin.requirements:
            missing = missing or requirement.missing(plugin, machine)
        if missing is None:
            ablation.plugins[name] = plugin
        else:
            ablation.absent[name] = f"not measurable here: {plugin.name} {missing}"


def _check_names(recipe: Recipe, tested: Sequence[str], sets: Sequence[Sequence[str]]) -> None:
    """Check that there are plugins to measure, and that each given set has only such plugins.

    Raises:
        UsageError: It is not so.
    """
    for names in sets:
        for name in names:
            if name not in tested:
                raise UsageError(
                    f"{name!r} is not a plugin that can be measured here.",
                    code="unknown-plugin",
                    place="--variants",
                    remedy=did_you_mean(name, tested),
                )
    if not tested:
        raise UsageError(
            "lists no plugin to measure.",
            code="nothing-to-measure",
            place=recipe.where,
            remedy="Add some: --with A,B. `fastloop plugins` lists them.",
        )


def _add_one_by_one(ablation: Ablation, tested: Sequence[str]) -> None:
    """Add a variant for each plugin: that plugin, and those before it that can be measured."""
    active: tuple[str, ...] = ()
    for name in tested:
        why_not = ablation.absent.get(name)
        if why_not is None:
            active = (*active, name)
            why_not = unresolvable(ablation, active)
        before = ablation.full().title
        ablation.variants.append(Variant(f"+ {name}", active, before=before, adds=(name,), why_not=why_not))


def _add_given_sets(ablation: Ablation, tested: Sequence[str], sets: Sequence[Sequence[str]]) -> None:
    """Add a variant for each given set of plugins.

    The title names the plugins that it adds to the set before, ``+ amp``, or all of them if some of that set are gone
    or another variant has this title: B; A; A,B are ``+ B``, ``A`` and ``A, B``.

    Raises:
        UsageError: A set is listed twice.
    """
    earlier: tuple[str, ...] = ()
    for names in sets:
        active = tuple(name for name in tested if name in names)
        added = tuple(name for name in active if name not in earlier)
        title = ""
        if set(earlier) <= set(active):
            title = " ".join(f"+ {name}" for name in added)
        listed = ", ".join(active) or "no plugins"
        for variant in ablation.variants:
            if variant.kind != "baseline" and variant.plugins == active:
                raise UsageError(
                    f"the set {listed} is listed twice.",
                    code="listed-twice",
                    place="--variants",
                    remedy="Remove one.",
                )
        if not title or any(title == variant.title for variant in ablation.variants):
            title = listed
        absent = [ablation.absent[name] for name in active if name in ablation.absent]
        why_not = "; ".join(absent) if absent else unresolvable(ablation, active)
        before = ablation.full().title
        ablation.variants.append(Variant(title, active, before=before, adds=added, why_not=why_not))
        earlier = active


def closure(ablation: Ablation, name: str) -> tuple[str, ...]:
    """The tested plugins that a plugin requires, directly or indirectly, in order and without itself."""
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        for reference in ablation.plugins[waiting.pop()].requires:
            for candidate, plugin in ablation.plugins.items():
                if candidate == name or candidate in needed:
                    continue
                if reference in (candidate, f"slot:{plugin.slot}"):
                    needed.add(candidate)
                    waiting.append(candidate)
    return tuple(candidate for candidate in ablation.plugins if candidate in needed)


def unresolvable(ablation: Ablation, names: Sequence[str]) -> str | None:
    """Why these plugins cannot run together without others; None if they can."""
    try:
        check(make_recipe(with_only(ablation.recipe, names), ablation.recipe.source))
    except UsageError as error:
        return str(error).removeprefix(f"{ablation.recipe.where}: ")
    return None


def _tested(recipe: Recipe) -> Iterator[str]:
    """The plugins that the recipe lists, without its task, the defaults and those that publish results."""
    default_names = defaults()
    for name, options in recipe.plugins.items():
        if options is False or name in default_names:
            continue
        plugin = load_listed(recipe, name)
        if plugin.slot != "task" and not plugin.publishes:
            yield name
