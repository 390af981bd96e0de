"""Commands that are plugins: ``[project.entry-points."fastloop.commands"]  warm = "my_package.cli:warm"``.

``warm`` is a function that typer takes, or a ``typer.Typer``. fastloop's own distribution registers its tools this way. A command of
another package is imported when it is called; help lists it by its package's metadata. If its name is one of fastloop's own, or
several packages have it, call it as ``package:name``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from fastloop.errors import UsageError, did_you_mean

GROUP = "fastloop.commands"


class Commands(TyperGroup):
    """The core's commands, fastloop's tools, and commands of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, fastloop's own first."""
        return [*self.commands, *tools(), *found(self.ours())]

    def ours(self) -> list[str]:
        """Names that no other package can take."""
        return [*self.commands, *tools()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """For the help: other packages are not imported."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if point := tools().get(cmd_name):
            return load(cmd_name, point)
        point = found(self.ours()).get(cmd_name)
        if point is None:
            return None
        dist = point.dist
        says = f"Of {dist.name} {dist.version}." if dist else "Of an installed package."
        if point.name in self.ours():
            says += f" `{point.name}` alone is fastloop's own."
        return typer.main.get_command(_app(cmd_name, lambda: None, says))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called: one of a package is imported here."""
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        points = tools() | found(self.ours())
        if name in points:
            return name, load(name, points[name]), args[1:]
        if rivals := [key for key in points if key.endswith(f":{name}")]:
            raise UsageError(f"{name}: a command of several packages. Say which: {' or '.join(rivals)}.")
        raise UsageError(f"there is no command {name!r}.{did_you_mean(name, self.list_commands(ctx))} `fastloop --help` lists them.")


@cache
def tools() -> dict[str, EntryPoint]:
    """Name -> entry point of the commands of fastloop's own distribution."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: point for point in points if point.dist is not None and point.dist.name == "fastloop"}


def found(ours: Iterable[str]) -> dict[str, EntryPoint]:
    """Name -> entry point of other packages' commands."""
    from fastloop.registry import installed

    ours = set(ours)
    return {name: point for name, point in installed(GROUP, taken=ours).items() if point not in tools().values()}


def load(name: str, point: EntryPoint) -> Any:
    """Import a command.

    Raises:
        UsageError: It does not import, or is not a function that typer takes; names the package and the reference.
    """
    from fastloop.registry import unsupported

    origin = f"{point.value} of {point.dist.name} {point.dist.version}" if point.dist else point.value
    what = f"command {name!r} ({origin})"
    if unfit := unsupported(point):
        raise UsageError(f"{what} {unfit}")
    try:
        function = point.load()
        if isinstance(function, typer.Typer):
            group = typer.main.get_group(function)
            group.name = name
            return group
        if not callable(function):
            raise TypeError(f"expected a function or a typer.Typer, found a {type(function).__name__}")
        command = typer.main.get_command(_app(name, function))
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    return command


def _app(name: str, function: Any, says: str | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=says)(function)
    return app
