"""The smallest change of a recipe that fits: as the command that trains it, which is tried before it is printed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop.cli.arguments import RecipeArguments
from fastloop.errors import UsageError
from fastloop.plugins.resolve import load_listed, resolve
from fastloop_tools.scale.model import quiet

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop_tools.scale.estimate import MemoryVariant

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

        Args:
            recipe: The recipe of this command.
            variants: All variants, whose options the recipe may have.
        """
        before, is_recomputed = strategy_of(recipe), recipe.plugins.get(CHECKPOINTING, False) is not False
        added = [variant.plugin] * (variant.plugin != before) + [CHECKPOINTING] * (
            variant.checkpointing and not is_recomputed
        )
        removed = [name for name in (before, CHECKPOINTING) if name and self._drops(name, variant, recipe)]
        given: dict[str, Any] = (recipe.plugins.get(variant.plugin) or {}) if variant.plugin == before else {}
        defaults = load_listed(recipe, variant.plugin)().option_values() if given else {}
        others = {key for other in variants if other.plugin == variant.plugin for key in other.options}
        wanted = {**{key: defaults[key] for key in given if key in others}, **variant.options}
        options = {key: value for key, value in wanted.items() if key not in given or given[key] != value}
        dropped = {f"plugins.{name}." for part in removed for name in (part, recipe.references.get(part, part))}
        dropped |= {f"plugins.{variant.plugin}.{key}=" for key in options}
        command = dataclasses.replace(
            self,
            overrides=[word for word in self.overrides if not word.startswith(tuple(dropped))]
            + [f"plugins.{variant.plugin}.{key}={json.dumps(value)}" for key, value in options.items()],
            with_plugins=[
                name
                for name in self.with_plugins
                if name not in removed and name not in map(recipe.references.get, removed)
            ]
            + added,
            without_plugins=[name for name in self.without_plugins if name not in added],
        )
        remaining = command.load().plugins
        still_there = [name for name in removed if remaining.get(name, False) is not False]
        return dataclasses.replace(command, without_plugins=[*command.without_plugins, *still_there])

    @staticmethod
    def _drops(name: str, variant: MemoryVariant, recipe: Recipe) -> bool:
        """Whether a variant leaves out a plugin of the recipe."""
        keeps = variant.checkpointing if name == CHECKPOINTING else name == variant.plugin
        return recipe.plugins.get(name, False) is not False and not keeps


def strategy_of(recipe: Recipe) -> str | None:
    """The strategy that a recipe lists."""
    listed = [name for name, options in recipe.plugins.items() if options is not False]
    return next((name for name in listed if load_listed(recipe, name).slot == "strategy"), None)


def smallest_change(
    variants: Sequence[MemoryVariant], accepts: Callable[[MemoryVariant], bool] = lambda _: True
) -> MemoryVariant | None:
    """The accepted variant that fits with the fewest changes of the recipe, and among those with the least traffic."""
    current = next((variant for variant in variants if variant.listed), None)
    if current is not None and current.fits is not False:
        return None

    def changes(variant: MemoryVariant) -> tuple[float, ...]:
        if current is None:
            return (1 + variant.checkpointing + bool(variant.host), variant.wire)
        different = variant.plugin != current.plugin
        options = (
            sum(current.options.get(key) != value for key, value in variant.options.items())
            if not different
            else bool(variant.host)
        )
        return (different + options + (variant.checkpointing != current.checkpointing), variant.host > 0, variant.wire)

    fitting = sorted((variant for variant in variants if variant.fits), key=changes)
    return next((variant for variant in fitting if accepts(variant)), None)
