"""Find and load commands: the five of the core, those of ``fastloop_tools``, and those of other packages.

All but the core's are entry points: ``[project.entry-points."fastloop.commands"]  warm = "my_package.cli:warm"``.
``warm`` is a function for typer, or a ``typer.Typer``. Calling a command imports it. The list of commands only reads
packages' metadata, and the docstrings of fastloop's own commands from their source. If fastloop or several packages use
the name, call the command as ``package:name``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fastloop.cli.usage import usage_errors
from fastloop.errors import UsageError
from fastloop.plugins.installed import (
    distribution_name,
    entry_points,
    installed,
    is_own,
    name_and_version,
    unsupported,
)
from fastloop.plugins.packages import DISTRIBUTION, suggest_command

GROUP = "fastloop.commands"
CORE = ("train", "plugins", "recipes", "schema", "doctor")
"""The core's commands: functions of the same name in modules of the same name."""


class Commands(TyperGroup):
    """The core's commands, fastloop's tools, and commands of other packages."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """The context of a command line. Raises a ``UsageError`` for an error in it."""
        with usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Call the command. Raises a ``UsageError`` for an error in its arguments."""
        with usage_errors(ctx):
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, fastloop's first."""
        return [*own(), *third_party()]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands for the help. Does not build their options, which takes longer than to import them."""
        points = own() | third_party()
        limit = formatter.width - 6 - max(map(len, points))
        with formatter.section("Commands"):
            listed = {name: TyperCommand(name, help=summary(point)) for name, point in points.items()}
            formatter.write_dl([(name, command.get_short_help_str(limit)) for name, command in listed.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command for the help. Does not import other packages."""
        if cmd_name in own():
            return own_command(cmd_name)
        point = third_party().get(cmd_name)
        return None if point is None else TyperCommand(cmd_name, help=summary(point))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to call. Imports it if it belongs to another package."""
        name = args[0]
        if name in own() or name.startswith("-"):
            return super().resolve_command(ctx, args)
        points = third_party()
        if name in points:
            return name, load(name, points[name]), args[1:]
        rivals = [key for key in points if key.endswith(f":{name}")]
        if rivals:
            raise UsageError(
                "a command of several packages.",
                code="ambiguous-name",
                place=name,
                remedy=f"Say which: {' or '.join(rivals)}.",
            )
        raise UsageError(
            f"there is no command {name!r}.",
            code="unknown-command",
            remedy=f"{suggest_command(name, self.list_commands(ctx))} `fastloop --help` lists them.",
        )


@cache
def own() -> dict[str, EntryPoint]:
    """Name -> entry point of the core's commands, fastloop's tools, and commands of packages of the project."""
    points = {name: EntryPoint(name, f"fastloop.cli.{name}:{name}", GROUP) for name in CORE}
    for point in sorted(entry_points(GROUP), key=lambda point: point.name):
        if is_own(point):
            points[point.name] = point
    return points


def summary(point: EntryPoint) -> str:
    """The docstring of a command of fastloop, without importing it; the package of another command."""
    if point not in own().values():
        origin = f"Of {' '.join(name_and_version(point.dist))}" if point.dist else "Of an installed package"
        # one sentence: the list shows no more
        return f"{origin}; `{point.name}` alone is fastloop's own." if point.name in own() else f"{origin}."
    spec = find_spec(point.module)  # imports the packages around the module
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    function = rf'def {point.attr}\(.*?^    """(.*?)"""'
    group = rf'{point.attr} = typer\.Typer\(.*?help="(.*?)"'
    match = re.search(rf"^(?:{function}|{group})", source, re.MULTILINE | re.DOTALL)
    return (match[1] or match[2]) if match else ""


@cache
def own_command(name: str) -> Any:
    """A command of fastloop."""
    return load(name, own()[name])


def third_party() -> dict[str, EntryPoint]:
    """Name -> entry point of other packages' commands."""
    if all(map(is_own, entry_points(GROUP))):
        return {}
    return {name: point for name, point in installed(GROUP, taken=own()).items() if not is_own(point)}


def load(name: str, point: EntryPoint) -> Any:
    """Import a command.

    Raises:
        UsageError: The import fails, or typer does not accept the function; names the package and the reference.
    """
    origin = f"{point.value} of {' '.join(name_and_version(point.dist))}" if point.dist else point.value
    label = f"command {name!r} ({origin})"
    if point.dist is not None and distribution_name(point) != DISTRIBUTION:
        problem = unsupported(point)
        if problem:
            raise UsageError(f"{label} {problem}", code="unsupported-version")
    try:
        function = point.load()
        if isinstance(function, typer.Typer):
            group = typer.main.get_group(function)
            group.name = name
            return group
        if not callable(function):
            raise TypeError(f"expected a function or a typer.Typer, found a {type(function).__name__}")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(name)(function)
        command = typer.main.get_command(app)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{label} cannot be imported: {type(error).__name__}: {error}", code="import-failed"
        ) from error
    return command
