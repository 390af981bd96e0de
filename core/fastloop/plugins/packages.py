"""The packages that the fastloop project releases beside its main one, and the plugins and commands that they have.

``packages.json`` lists them for messages: a recipe or a command line that names a plugin or a command of a package that
is not installed gets the command that installs it. No plugin is found by this list; a test compares it with packages/.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastloop.errors import did_you_mean

DISTRIBUTION = "fastloop-train"
"""Name of fastloop's distribution. The name ``fastloop`` on the package index belongs to another project."""

IMPORT_NAMES = frozenset({"fastloop", "fastloop_plugins", "fastloop_tools"})
"""Names under which the code of this distribution is imported."""


@dataclass(frozen=True)
class OwnPackage:
    """A package of the project.

    Attributes:
        distribution: Its name on the package index.
        extra: The extra of fastloop's distribution that brings it; empty: there is none.
        plugins: Names of its plugins.
        commands: Names of its commands.
    """

    distribution: str
    extra: str = ""
    plugins: Sequence[str] = ()
    commands: Sequence[str] = ()

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install '{DISTRIBUTION}[{self.extra}]'" if self.extra else f"pip install {self.distribution}"


PACKAGES = tuple(OwnPackage(**entry) for entry in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")))
"""The packages of the table ``packages.json``."""

OWN_DISTRIBUTIONS = frozenset({DISTRIBUTION, *(package.distribution for package in PACKAGES)})
"""Names of all distributions of the project. ``auto`` asks their plugins."""

PLUGINS = {plugin: package for package in PACKAGES for plugin in package.plugins}
"""Plugin -> the package that has it."""

COMMANDS = {command: package for package in PACKAGES for command in package.commands}
"""Command -> the package that has it."""


def suggest_plugin(name: str, installed: Iterable[str]) -> str:
    """The end of a message about a plugin that is not installed: the package to install, or the nearest name."""
    return _suggest(name, installed, PLUGINS)


def suggest_command(name: str, installed: Iterable[str]) -> str:
    """The end of a message about a command that is not installed: the package to install, or the nearest name."""
    return _suggest(name, installed, COMMANDS)


def _suggest(name: str, installed: Iterable[str], of_packages: Mapping[str, OwnPackage]) -> str:
    package = of_packages.get(name)
    if package is not None:
        return f" The package {package.distribution} has it. Install it: `{package.install}`."
    return did_you_mean(name, {*installed, *of_packages})
