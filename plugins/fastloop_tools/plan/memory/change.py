"""The smallest change of a recipe that fits: as the command that trains it, which is tried before it is printed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop.cli.arguments import RecipeArguments
from fastloop.errors import UsageError
from fastloop.plugins.resolve import load_listed, resolve
from fastloop_tools.plan.memory.model import quiet

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop_tools.plan.memory.estimate import MemoryVariant

CHECKPOINTING = "activation-checkpointing"


@dataclass(frozen=True)
class Command(RecipeArguments):
    """The arguments of `fastloop plan` or `fastloop train`.

    Attributes:
        nproc: Processes of one machine.
        nnodes: Machines.
    """

    nproc: int = 1
    nnodes: int = 1

    def lines(self, width: int) -> Iterator[str]:
        """`fastloop train` with these arguments, in lines that a shell joins."""
        words = ["fastloop", "train", self.recipe, *self.overrides, "--nproc", str(self.nproc)]
        if self.nnodes > 1:
            words += ["--nnodes", str(self.nnodes), "--node-rank", "RANK", "--master", "HOST:PORT"]
        words += self.plugin_words()
        line = ""
        for word in map(shlex.quote, words):
            if line and len(line) + len(word) > width:
                yield f"{line}\\"
                line = ""
            line += f"{word} "
        yield line.rstrip()

    def is_accepted(self) -> bool:
        """Whether the recipe with these arguments resolves: plugins may conflict, or refuse the optimizer."""
        try:
            with quiet():
                resolved = resolve(self.load(), any_machine=True)
                resolved.plugins.hooks.check_recipe(recipe=resolved.recipe, plugins=resolved.plugins)
        except UsageError:
            return False
        return True

    def changed(self, recipe: Recipe, variant: MemoryVariant, variants: Iterable[MemoryVariant]) -> Command:
        """The command that trains a variant.

        With `ddp` in the recipe, the variant `fsdp` with activation checkpointing adds
        ``--with fsdp,activation-checkpointing --without ddp``.

        Args:
            recipe: The recipe of this command.
            variants: All variants, whose options the recipe may have.
        """
        strategy = strategy_of(recipe)
        added = []
        if variant.plugin != strategy:
            added.append(variant.plugin)
        if variant.checkpointing and not recipe.has_plugin(CHECKPOINTING):
            added.append(CHECKPOINTING)
        removed = []
        if strategy is not None and strategy != variant.plugin:
            removed.append(strategy)
        if recipe.has_plugin(CHECKPOINTING) and not variant.checkpointing:
            removed.append(CHECKPOINTING)
        options = options_to_set(recipe, variant, variants)
        command = dataclasses.replace(
            self,
            overrides=self._overrides(recipe, variant.plugin, options, removed),
            with_plugins=self._with_plugins(recipe, added, removed),
            without_plugins=[name for name in self.without_plugins if name not in added],
        )
        # A plugin that only --with has added is gone now. One that the recipe's file lists needs --without.
        remaining = command.load()
        in_file = [name for name in removed if remaining.has_plugin(name)]
        return dataclasses.replace(command, without_plugins=[*command.without_plugins, *in_file])

    def _overrides(self, recipe: Recipe, plugin: str, options: Mapping[str, Any], removed: Sequence[str]) -> list[str]:
        """The overrides, without those of removed plugins and of the options to set, which are added.

        Args:
            plugin: The plugin that gets the options.
        """
        dropped = [f"plugins.{plugin}.{key}=" for key in options]
        for name in removed:
            dropped += [f"plugins.{name}.", f"plugins.{recipe.references.get(name, name)}."]
        overrides = [word for word in self.overrides if not word.startswith(tuple(dropped))]
        for key, value in options.items():
            overrides.append(f"plugins.{plugin}.{key}={json.dumps(value)}")
        return overrides

    def _with_plugins(self, recipe: Recipe, added: Sequence[str], removed: Sequence[str]) -> list[str]:
        """The plugins of ``--with``, without the removed ones, by name or as the recipe lists them."""
        dropped = {*removed, *(recipe.references.get(name, name) for name in removed)}
        return [name for name in self.with_plugins if name not in dropped] + list(added)


def strategy_of(recipe: Recipe) -> str | None:
    """The strategy that a recipe lists."""
    for name in recipe.plugins:
        if recipe.has_plugin(name) and load_listed(recipe, name).slot == "strategy":
            return name
    return None


def options_to_set(recipe: Recipe, variant: MemoryVariant, variants: Iterable[MemoryVariant]) -> dict[str, Any]:
    """The options of a variant that the recipe does not have yet.

    An option that selects another variant of the same strategy gets its default: with ``fsdp: {cpu_offload: true}`` in
    the recipe, the plain variant sets ``cpu_offload`` to false.
    """
    current: dict[str, Any] = {}
    if variant.plugin == strategy_of(recipe):
        current = recipe.plugins.get(variant.plugin) or {}
    wanted: dict[str, Any] = {}
    if current:
        defaults = load_listed(recipe, variant.plugin)().option_values()
        selecting = set[str]()  # options by which the variants of the strategy differ
        for alternative in variants:
            if alternative.plugin == variant.plugin:
                selecting.update(alternative.options)
        wanted = {key: defaults[key] for key in current if key in selecting}
    wanted |= variant.options
    return {key: value for key, value in wanted.items() if key not in current or current[key] != value}


def smallest_change(
    variants: Sequence[MemoryVariant], accepts: Callable[[MemoryVariant], bool] = lambda _: True
) -> MemoryVariant | None:
    """The accepted variant that fits with the fewest changes of the recipe, and among those with the least traffic."""
    current = next((variant for variant in variants if variant.listed), None)
    if current is not None and current.fits is not False:
        return None
    fitting = [variant for variant in variants if variant.fits]
    fitting.sort(key=lambda variant: cost(variant, current))
    return next((variant for variant in fitting if accepts(variant)), None)


def cost(variant: MemoryVariant, current: MemoryVariant | None) -> tuple[float, ...]:
    """The number of changes of the recipe, whether the variant uses the host's memory, and its traffic.

    Args:
        current: The variant that the recipe selects; None: it selects none of them.
    """
    if current is None:
        changes = 1 + variant.checkpointing + (variant.host > 0)
    elif variant.plugin != current.plugin:
        changes = 1 + (variant.host > 0) + (variant.checkpointing != current.checkpointing)
    else:
        changed = [key for key, value in variant.options.items() if current.options.get(key) != value]
        changes = len(changed) + (variant.checkpointing != current.checkpointing)
    uses_host = current is not None and variant.host > 0
    return changes, uses_host, variant.sent_bytes
