"""``fastloop plugins``: list the installed plugins from package metadata and source text, without importing them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.plugins.installed import GROUP, name_and_version
from fastloop.plugins.plugin import Device, Dtype, Package, Plugin, When
from fastloop.strategy import Strategy

if TYPE_CHECKING:
    from rich.table import Table

KEYWORD = "fastloop-plugin"
"""Keyword in the metadata of packages with plugins, and topic of their repositories. `fastloop new plugin` writes
it."""
SEARCH = f"""More plugins: search PyPI for the keyword {KEYWORD}, or open
https://github.com/topics/{KEYWORD}"""


def plugins(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this plugin's declarations, options and a recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the installed plugins, or show one."""
    import rich
    from rich.text import Text

    from fastloop.cli.messages import report_as_json
    from fastloop.plugins.installed import installed

    if as_json:
        report_as_json()
    if name is not None:
        show(name, as_json)
        return
    rows = [listing(key, point) for key, point in installed().items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for package in sorted({(row["distribution"], row["version"]) for row in rows}):
        table = _table(
            "plugin", "numerics", "what it does", title=" ".join(package), title_justify="left", title_style="bold"
        )
        members = [row for row in rows if (row["distribution"], row["version"]) == package]
        for group in sorted({row["group"] for row in members}):
            if group:
                table.add_row(Text(group, style="bold"))
            for row in members:
                if row["group"] == group:
                    brief = re.split(r"[.:;](?:\s|$)", row["summary"].replace("`", ""))[0]
                    slot = f" (slot {row['slot']})" if row["slot"] else ""
                    table.add_row("  " * bool(group) + row["name"], row["numerics"] or "", Text(brief + slot))
        rich.print(table)
        typer.echo()
    for text in packages_without_plugins():
        typer.echo(text)
    typer.echo(f"`fastloop plugins NAME` shows one with its options and a recipe.\n{SEARCH}")


def _table(*columns: str, **settings: Any) -> Table:
    """A table without lines. The last column wraps."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, **settings)
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def listing(name: str, point: EntryPoint) -> dict[str, Any]:
    """The row of a plugin, from package metadata and source text, without importing it. ``group`` is the subpackage
    that holds it."""
    facts = {"slot": None, "numerics": None, "summary": "", **_declared(point)}
    distribution, version = name_and_version(point.dist) if point.dist else ("", "")
    return {
        "name": name,
        "distribution": distribution,
        "version": version,
        "group": ".".join(point.value.partition(":")[0].strip().split(".")[1:-1]),
        **facts,
    }


def _declared(point: EntryPoint) -> dict[str, Any]:
    module, _, cls = point.value.partition(":")
    path = _find_module(module.strip())
    if path is None:
        return {"summary": f"cannot be found: there is no module {module}"}
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError) as error:
        return {"summary": f"cannot be read: {path.name}: {error}"}
    return {"summary": (ast.get_docstring(tree) or "").partition("\n")[0]} | _class_facts(tree, cls.strip())


def _class_facts(tree: ast.Module, name: str) -> dict[str, Any]:
    """Slot and numerics of a class, from the source text of its module and of those of its bases."""
    from fastloop.recipe.plugin_references import read_literals

    usual: dict[str, Any] = {}
    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    for base in (name,) if node is None else [ast.unparse(base).rpartition(".")[2] for base in node.bases]:
        if base in ("Plugin", "Strategy"):
            usual = {"slot": (Strategy if base == "Strategy" else Plugin).slot, "numerics": Plugin.numerics}
        elif (path := _find_import(tree, base)) is not None:
            with suppress(OSError, SyntaxError, RecursionError):
                usual = _class_facts(ast.parse(path.read_bytes(), str(path)), base)
    given = {} if node is None else read_literals(node)
    return usual | {
        key: value for key, value in given.items() if key in ("slot", "numerics") and isinstance(value, str | None)
    }


def _find_import(tree: ast.Module, name: str) -> Path | None:
    """The file that a module imports a name from."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in [alias.asname or alias.name for alias in node.names]
        ):
            return _find_module(node.module)
    return None


def _find_module(name: str) -> Path | None:
    """The file of a module, found without importing its package."""
    relative = "/".join(name.split("."))
    return next(filter(None, (_locate(f"{relative}{end}") for end in (".py", "/__init__.py"))), None)


def _locate(file: str) -> Path | None:
    """Find the file of a module on the import path, without importing its package."""
    import sys

    return next((path for folder in sys.path if (path := Path(folder or ".") / file).is_file()), None)


def packages_without_plugins() -> list[str]:
    """A sentence about each installed package that has the keyword, but no entry point for a plugin."""
    found = []
    for dist in distributions():
        with suppress(UnicodeDecodeError):  # metadata that is not UTF-8
            declared = re.search(rf"(?im)^Keywords:.*\b{KEYWORD}\b", dist.read_text("METADATA") or "")
            if declared and not dist.entry_points.select(group=GROUP):
                found.append(
                    f"{dist.name} {dist.version} has the keyword {KEYWORD}, but no entry point in the group {GROUP}."
                )
    return found


def hooks_of(cls: type[Plugin]) -> list[str]:
    """The hooks that a plugin implements, in firing order; then those that other plugins declare."""
    from fastloop import hookspecs

    marked = [name for name in dir(cls) if hasattr(getattr(cls, name), "fastloop_impl")]
    return [name for name in vars(hookspecs) if name in marked] + [
        name for name in marked if name not in vars(hookspecs)
    ]


def is_wrapper(cls: type[Plugin], hook: str) -> bool:
    """Whether a plugin's implementation of a hook is a wrapper."""
    marks = getattr(cls, hook).fastloop_impl
    return bool(marks["wrapper"] or marks["hookwrapper"])


def requirement(need: Any) -> str:
    """A requirement in a few words."""
    match need:
        case Package():
            extra = f": `pip install '{need.of}[{need.extra}]'`" if need.extra else ""
            return f"the package `{need.distribution}{need.version}`{extra}"
        case Device():
            return f"a device of type {' or '.join(need.kinds)}"
        case Dtype():
            return f"a device that computes in {need.name}"
        case When():
            return f"with some options, {requirement(need.need)}"
    return (type(need).__doc__ or type(need).__name__).strip().partition("\n")[0].rstrip(".")


def documentation(cls: type[Plugin]) -> tuple[str, str]:
    """The docstring of a plugin's module in two parts: the text, and the recipe that it shows. Without one, the recipe
    lists the name."""
    import inspect
    import textwrap

    text = inspect.cleandoc(getattr(inspect.getmodule(cls), "__doc__", None) or cls.__doc__ or "")
    blocks = re.findall(r"(?m)(?:^ {4}.*\n?)(?:(?:^ {4}.*|^[ ]*)\n?)*", text)
    shown = next((block for block in blocks if re.search(r"(?m)^ {4}plugins:", block)), "")
    recipe = textwrap.dedent(shown).strip() or f"plugins:\n  - {cls.name}"
    return (text.replace(shown, "") if shown else text).strip(), recipe


def show(name: str, as_json: bool) -> None:
    """Import a plugin and print its documentation, declarations, options with types and defaults, and a recipe."""
    import rich
    from rich.markup import escape

    from fastloop.cli.option_table import describe
    from fastloop.plugins.declared_options import options_of
    from fastloop.plugins.installed import find_entry_point, load

    cls = load(name, "fastloop plugins")
    options = describe(options_of(cls))
    text, recipe = documentation(cls)
    hooks = hooks_of(cls)
    facts = {
        **listing(cls.name, find_entry_point(name, "fastloop plugins")),
        "description": cls.description,
        "requirements": list(dict.fromkeys(map(requirement, cls.requirements))),
        "requires": list(cls.requires),
        "conflicts": dict(cls.conflicts),
        "hooks": hooks,
        "runs_after": list(cls.runs_after),
        "runs_before": list(cls.runs_before),
        "options": [vars(option) for option in options],
        "recipe": recipe,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{cls.name} ({facts['distribution']} {facts['version']})\n")
    typer.echo(_wrapped(text))
    table = _table("", "")
    rows: dict[str, Iterable[str]] = {
        "in a run": [cls.description],
        "slot": [cls.slot or "none"],
        "numerics": [cls.numerics],
        "requirements": facts["requirements"],
        "requires": cls.requires,
        "conflicts": [f"{other}: {reason}" for other, reason in cls.conflicts.items()],
        "hooks": [", ".join(f"{hook} (wraps it)" if is_wrapper(cls, hook) else hook for hook in hooks)],
        "runs_after": [", ".join(cls.runs_after)],
        "runs_before": [", ".join(cls.runs_before)],
    }
    for key, values in rows.items():
        if shown := "\n".join(filter(None, values)):
            table.add_row(key, escape(shown))
    table.show_header = False
    rich.print("", table)
    if options:
        table = _table("option", "type", "default", "what it does")
        for column in table.columns[1:]:
            column.no_wrap = False
        for option in options:
            table.add_row(*(escape(cell) for cell in vars(option).values()))  # list[str] is no markup
        typer.echo()
        rich.print(table)
    typer.echo(f"\nIn a recipe:\n\n{recipe}")


def _wrapped(text: str) -> str:
    """Paragraphs that fit the terminal. Lists and code keep their lines."""
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    paragraphs = re.split(r"\n{2,}", text)
    return "\n\n".join(
        part if re.search(r"(?m)^(?: |[*-] )", part) else textwrap.fill(part, width) for part in paragraphs
    )
