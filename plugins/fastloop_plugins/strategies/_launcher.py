"""Settings of ``accelerate launch`` for a strategy: environment variables that its configuration file sets."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn

from fastloop import PluginError
from fastloop.recipe import Train

if TYPE_CHECKING:
    from fastloop import Plugin
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


class Launcher:
    """Takes settings of the launcher over into the recipe, which is saved with the run, and refuses the others.

    Args:
        recipe: The recipe; ``take`` changes it.
        plugin: The strategy, whose options ``take`` changes.
    """

    def __init__(self, recipe: Recipe, plugin: Plugin) -> None:
        self.recipe = recipe
        self.plugin = plugin

    def asked(self, variable: str) -> str | None:
        """The value of a variable; None if it is not set, or says nothing."""
        value = os.environ.get(variable, "")
        return None if value.lower() in ("", "auto") else value

    def is_on(self, variable: str) -> bool:
        """Whether a variable is true."""
        return (self.asked(variable) or "").lower() in ("true", "1", "yes")

    def take(self, variable: str, option: str, value: Any) -> None:
        """Set an option of the strategy, or a key of ``train``, unless the recipe sets it.

        Args:
            option: ``train.KEY``, or the name of the option.

        Raises:
            PluginError: The recipe has another value, or this machine lacks what the option needs.
        """
        from fastloop.runtime.hardware import this_machine

        plugin = self.plugin.name
        plugins = self.recipe.plugins
        asked = os.environ[variable]
        is_ours = not option.startswith("train.")
        key = option.removeprefix("train.")
        if is_ours:
            place = f"plugins.{plugin}.{key}"
            current = self.plugin.option_values()[key]
            default = type(self.plugin)().option_values()[key]
        else:
            place = option
            current = getattr(self.recipe.train, key)
            default = getattr(Train(), key)
        if current == value:
            return
        is_listed = is_ours and (plugins.get(plugin) or {}).get(key) is not None
        if is_listed or current != default:
            raise PluginError(
                f"accelerate's configuration asks for {asked!r} ({variable}), and {place} is {current!r}.",
                code="launcher-differs",
                place=self.recipe.where,
                remedy="Make them the same, or start with another launcher:",
                command="fastloop train RECIPE --nproc N",
            )
        if is_ours:
            self.plugin.set_option(key, value)
        else:
            setattr(self.recipe.train, key, value)
        for need in self.plugin.requirements:
            missing = need.missing(self.plugin, this_machine(self.recipe.train.device))
            if missing:
                raise PluginError(
                    f"accelerate's configuration asks for {asked!r} ({variable}), and {place} "
                    f"{missing.removesuffix('.')}.",
                    code="launcher-differs",
                    place=self.recipe.where,
                    remedy="Take it out there.",
                )
        if is_ours and plugin in plugins:
            plugins[plugin] = {**(plugins[plugin] or {}), key: value}
        logger.info("%s: %s is %r, as accelerate's configuration asks (%s)", plugin, place, value, variable)

    def refuse(self, variable: str, remedy: str) -> NoReturn:
        """Raise an error for a setting that no option stands for.

        Args:
            remedy: The setting to use instead.
        """
        raise PluginError(
            f"accelerate's configuration asks for {os.environ[variable]!r} ({variable}), and the plugin "
            f"{self.plugin.name!r} has no option for it.",
            code="launcher-differs",
            place=self.recipe.where,
            remedy=remedy,
        )
