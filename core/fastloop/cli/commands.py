"""Commands of other packages: ``[project.entry-points."fastloop.commands"]  warm = "my_package.cli:warm"``.

``warm`` is a function for typer, or a ``typer.Typer``. fastloop's own tools are registered this way. Calling a command
imports it; the help only reads the package's metadata. If fastloop or several packages use the name, call the command
as ``package:name``.

fastloop's tools may also add options to a command of the core: see ``extended``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperGroup

from fastloop.errors import UsageError, did_you_mean
from fastloop.plugins.installed import entry_points, is_own, name_and_version, own_entry_points

GROUP = "fastloop.commands"
OPTIONS = "fastloop.options"


class Commands(TyperGroup):
    """The core's commands, fastloop's tools, and commands of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, fastloop's first."""
        return [*self.commands, *tools(), *third_party(self.reserved())]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands for the help. Does not build their options, which takes longer than to import them."""
        others = third_party(self.reserved())
        names = [*self.reserved(), *others]
        limit = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.listed(name, others).get_short_help_str(limit)) for name in names])

    def listed(self, name: str, others: Mapping[str, EntryPoint]) -> Any:
        """A command without its options. Does not import other packages."""
        if point := others.get(name):
            origin = f"Of {' '.join(name_and_version(point.dist))}" if point.dist else "Of an installed package"
            if point.name in self.reserved():
                origin += f"; `{point.name}` alone is fastloop's own"
            # one sentence: the list shows no more
            return typer.main.get_command(_app(name, lambda: None, f"{origin}."))
        return load(name, tools()[name], with_options=False) if name in tools() else self.commands[name]

    def reserved(self) -> list[str]:
        """Names of fastloop's own commands."""
        return [*self.commands, *tools()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command for the help. Does not import other packages."""
        if cmd_name in self.commands:
            return extended(self.commands[cmd_name])
        if point := tools().get(cmd_name):
            return load(cmd_name, point)
        others = third_party(self.reserved())
        return self.listed(cmd_name, others) if cmd_name in others else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to call. Imports it if it belongs to another package."""
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        points = tools() | third_party(self.reserved())
        if name in points:
            return name, load(name, points[name]), args[1:]
        if rivals := [key for key in points if key.endswith(f":{name}")]:
            raise UsageError(f"{name}: a command of several packages. Say which: {' or '.join(rivals)}.")
        raise UsageError(
            f"there is no command {name!r}.{did_you_mean(name, self.list_commands(ctx))} `fastloop --help` lists them."
        )


@cache
def tools() -> dict[str, EntryPoint]:
    """Name -> entry point of the commands of fastloop's own distribution."""
    return own_entry_points(GROUP)


@cache
def extended(command: Any) -> Any:
    """A command of the core with the options of fastloop's tools.

    An entry point adds them: ``[project.entry-points."fastloop.options"]  "plan.x" = "module:name"``.

    The function's options are added to those of the command ``plan``. Parameters with equal names share one value.
    Functions are called before the command's own, in the order of their entry points' names. The first one that returns
    True has done the command's work.
    """
    calls: list[tuple[Any, set[str]]] = []
    own = command.callback, {parameter.name for parameter in command.params}
    for point in sorted(entry_points(OPTIONS), key=lambda point: point.name):
        if point.name.partition(".")[0] == command.name and is_own(point):
            part = load(command.name, point)
            known = {parameter.name for parameter in command.params}
            command.params += [parameter for parameter in part.params if parameter.name not in known]
            calls.append((part.callback, {parameter.name for parameter in part.params}))

    def call(**values: Any) -> None:
        for function, names in (*calls, own):
            if function(**{name: value for name, value in values.items() if name in names}):
                return

    if calls:
        command.callback = call
    return command


def third_party(reserved: Iterable[str]) -> dict[str, EntryPoint]:
    """Name -> entry point of other packages' commands."""
    if all(map(is_own, entry_points(GROUP))):
        return {}
    from fastloop.plugins.installed import installed  # only here: importing it takes longer than the help

    return {name: point for name, point in installed(GROUP, taken=set(reserved)).items() if not is_own(point)}


def load(name: str, point: EntryPoint, with_options: bool = True) -> Any:
    """Import a command. Without options, it only has a help text.

    Raises:
        UsageError: The import fails, or typer does not accept the function; names the package and the reference.
    """
    origin = f"{point.value} of {' '.join(name_and_version(point.dist))}" if point.dist else point.value
    label = f"command {name!r} ({origin})"
    if not is_own(point):
        from fastloop.plugins.installed import part

        if problem := part("plugin-checks").unsupported(point):
            raise UsageError(f"{label} {problem}")
    try:
        function = point.load()
        if isinstance(function, typer.Typer):
            group = typer.main.get_group(function)
            group.name = name
            return group
        if not callable(function):
            raise TypeError(f"expected a function or a typer.Typer, found a {type(function).__name__}")
        app = _app(name, function) if with_options else _app(name, lambda: None, function.__doc__)
        command = typer.main.get_command(app)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{label} cannot be imported: {type(error).__name__}: {error}") from error
    return command


def _app(name: str, function: Any, help_text: str | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=help_text)(function)
    return app
