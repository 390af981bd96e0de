"""``fastloop plugins``: list the installed plugins from package metadata and source text, without importing them."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import typer

from fastloop.plugin import Plugin


def plugins(
    name: Annotated[str | None, typer.Argument(help="Show one plugin's options, hooks and documentation.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the installed plugins, or show one."""
    import rich
    from rich.markup import escape
    from rich.table import Table

    from fastloop.registry import installed

    if name is not None:
        show(name, as_json)
        return
    rows = [listing(key, point) for key, point in installed().items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for package in sorted({(row["distribution"], row["version"]) for row in rows}):
        table = Table(box=None, pad_edge=False, title=" ".join(package), title_justify="left", title_style="bold")
        for column, wraps in (("plugin", False), ("slot", False), ("numbers", False), ("what it does", True)):
            table.add_column(column, no_wrap=not wraps)
        for row in rows:
            if (row["distribution"], row["version"]) == package:
                brief = re.split(r"[.:;]", row["summary"].replace("`", ""))[0]
                table.add_row(row["name"], row["slot"] or "", row["numerics"] or "", escape(brief))
        rich.print(table)
    typer.echo("\n`fastloop plugins NAME` shows one with its options.")


def listing(name: str, point: EntryPoint) -> dict[str, Any]:
    """The row of a plugin, from package metadata and source text, without importing it."""
    facts = {"slot": None, "numerics": None, "summary": "", **_declared(point)}
    return {
        "name": name,
        "distribution": point.dist.name if point.dist else "",
        "version": point.dist.version if point.dist else "",
        **facts,
    }


def _declared(point: EntryPoint) -> dict[str, Any]:
    from fastloop.recipe.plugin_references import read_declarations

    module, _, cls = point.value.partition(":")
    relative = "/".join(module.strip().split("."))
    files = (_locate(f"{relative}{end}") for end in (".py", "/__init__.py"))
    path = next(filter(None, files), None)
    if path is None:
        return {"summary": f"cannot be found: there is no module {module}"}
    try:
        source = read_declarations(path)
    except (OSError, SyntaxError) as error:
        return {"summary": f"cannot be read: {path.name}: {error}"}
    cls = cls.strip()
    usual = {"slot": Plugin.slot, "numerics": Plugin.numerics} if source.bases.get(cls) == ["Plugin"] else {}
    given = {
        key: value for key, value in source.classes.get(cls, {}).items() if key in ("slot", "numerics") and isinstance(value, str | None)
    }
    return {"summary": source.summary} | usual | given


def _locate(file: str) -> Path | None:
    """Find the file of a module on the import path, without importing its package."""
    import sys

    return next((path for folder in sys.path if (path := Path(folder or ".") / file).is_file()), None)


def show(name: str, as_json: bool) -> None:
    """Import a plugin and print its documentation, hooks, and options with types and defaults."""
    import inspect

    import rich
    from rich.markup import escape
    from rich.table import Table

    from fastloop import hookspecs
    from fastloop.options import describe
    from fastloop.plugin import Observer
    from fastloop.registry import find, load

    cls = load(name, "fastloop plugins")
    options = describe(cls.Config) + (describe(Observer) if cls.read_only else [])
    hooks = [hook for hook in vars(hookspecs) if hasattr(getattr(cls, hook, None), "fastloop_impl")]
    hooks += [hook for hook in dir(cls) if hook not in hooks and hasattr(getattr(cls, hook), "fastloop_impl")]
    facts = {
        **listing(cls.name, find(name, "fastloop plugins")),
        "hooks": hooks,
        "requires": list(cls.requires),
        "conflicts": dict(cls.conflicts),
        "runs_after": list(cls.runs_after),
        "runs_before": list(cls.runs_before),
        "options": [vars(option) for option in options],
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{cls.name} ({facts['distribution']} {facts['version']})\n")
    typer.echo(inspect.cleandoc(inspect.getmodule(cls).__doc__ or cls.__doc__ or ""))
    typer.echo(f"\nslot: {cls.slot or 'none'}    numbers: {cls.numerics}    hooks: {', '.join(hooks)}")
    for key in ("requires", "conflicts", "runs_after", "runs_before"):
        if facts[key]:
            typer.echo(f"{key}: {', '.join(facts[key])}")
    if options:
        table = Table("option", "type", "default", "what it does", box=None, pad_edge=False)
        for option in options:
            table.add_row(*(escape(cell) for cell in vars(option).values()))  # list[str] is no markup
        typer.echo()
        rich.print(table)
