"""``fastloop plugins``: what is installed, read from metadata and source text: listing imports no plugin."""

from __future__ import annotations

import ast
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
                table.add_row(row["name"], row["slot"] or "", row["parity"] or "", escape(brief))
        rich.print(table)
    typer.echo("\n`fastloop plugins NAME` shows one with its options.")


def listing(name: str, point: EntryPoint) -> dict[str, Any]:
    """A plugin's row, without importing it: distribution from metadata, the rest from the text of its source."""
    facts = {"slot": None, "parity": None, "summary": "", **_read_source(point)}
    return {
        "name": name,
        "distribution": point.dist.name if point.dist else "",
        "version": point.dist.version if point.dist else "",
        **facts,
    }


def _read_source(point: EntryPoint) -> dict[str, Any]:
    relative = Path(*point.module.split("."))
    for file in (relative.with_suffix(".py"), relative / "__init__.py"):
        path = _locate(point, file)
        if path is None:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        facts: dict[str, Any] = {"summary": (ast.get_docstring(tree) or "").partition("\n")[0]}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == point.attr:
                if [ast.unparse(base).rpartition(".")[2] for base in node.bases] == ["Plugin"]:
                    facts |= {"slot": Plugin.slot, "parity": Plugin.parity}
                for item in node.body:
                    if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Constant):
                        target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                        if isinstance(target, ast.Name) and target.id in ("slot", "parity"):
                            facts[target.id] = item.value.value
        return facts
    return {}


def _locate(point: EntryPoint, file: Path) -> Path | None:
    """A module's file on the import path, found without importing its package."""
    import sys

    return next((path for folder in sys.path if (path := Path(folder or ".") / file).is_file()), None)


def show(name: str, as_json: bool) -> None:
    """One plugin, imported: its options with types and defaults, its hooks, its documentation."""
    import inspect

    import rich
    from rich.markup import escape
    from rich.table import Table

    from fastloop import hookspecs
    from fastloop.options import describe
    from fastloop.registry import installed, load

    cls = load(name, "fastloop plugins")
    options = describe(cls.Config)
    hooks = [hook for hook in vars(hookspecs) if hasattr(getattr(cls, hook, None), "fastloop_impl")]
    facts = {
        **listing(cls.name, installed()[name]),
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
    typer.echo(f"\nslot: {cls.slot or 'none'}    numbers: {cls.parity}    hooks: {', '.join(hooks)}")
    for key in ("requires", "conflicts", "runs_after", "runs_before"):
        if facts[key]:
            typer.echo(f"{key}: {', '.join(facts[key])}")
    if options:
        table = Table("option", "type", "default", "what it does", box=None, pad_edge=False)
        for option in options:
            table.add_row(*(escape(cell) for cell in vars(option).values()))  # list[str] is no markup
        typer.echo()
        rich.print(table)
