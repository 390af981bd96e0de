"""``fastloop plugins``: list the installed plugins from package metadata and source text, without importing them."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.cli.tables import print_table
from fastloop.plugins.installed import GROUP, name_and_version
from fastloop.plugins.plugin import NOT_DECLARED, Device, Dtype, Package, Plugin, When, shown_numerics
from fastloop.problem import clause
from fastloop.strategy import Strategy

if TYPE_CHECKING:
    from rich.table import Table

    from fastloop.cli.option_table import OptionInfo

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
    from fastloop.cli.messages import report_as_json
    from fastloop.plugins.installed import installed

    if as_json:
        report_as_json()
    if name is not None:
        show(name, as_json)
        return
    rows = [listing(key, point) for key, point in installed().items()]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    packages = sorted({row.package for row in rows})
    for package in packages:
        print_table(package_table(package, [row for row in rows if row.package == package]))
        typer.echo()
    for text in packages_without_plugins():
        typer.echo(text)
    typer.echo(f"`fastloop plugins NAME` shows one with its options and a recipe.\n{SEARCH}")


@dataclass(frozen=True)
class ListedPlugin:
    """A row of the list of plugins.

    Attributes:
        distribution, version: Those of its package; empty if its metadata names none.
        group: The subpackage that holds it; empty: the package itself.
        slot: Its slot; None: it has none, or the source text does not show it.
        numerics: Its numerics class; None: the source text does not show it.
        summary: The first line of its module's docstring.
    """

    name: str
    distribution: str
    version: str
    group: str
    slot: str | None = None
    numerics: str | None = None
    summary: str = ""

    @property
    def package(self) -> str:
        """Name and version of the package."""
        return f"{self.distribution} {self.version}"


def package_table(package: str, rows: list[ListedPlugin]) -> Table:
    """The plugins of a package, with a line for each subpackage."""
    from rich.text import Text

    table = _table("plugin", "numerics", "what it does", title=package, title_justify="left", title_style="bold")
    for group in sorted({row.group for row in rows}):
        indent = ""
        if group:
            table.add_row(Text(group, style="bold"))
            indent = "  "
        for row in rows:
            if row.group == group:
                brief = re.split(r"[.:;](?:\s|$)", row.summary.replace("`", ""))[0]
                slot = f" (slot {row.slot})" if row.slot else ""
                table.add_row(indent + row.name, row.numerics or "", Text(brief + slot))
    return table


def _table(*columns: str, **settings: Any) -> Table:
    """A table without lines. The last column wraps."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, **settings)
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def listing(name: str, point: EntryPoint) -> ListedPlugin:
    """The row of a plugin, from package metadata and source text, without importing it."""
    module, _, cls = (part.strip() for part in point.value.partition(":"))
    distribution, version = name_and_version(point.dist) if point.dist else ("", "")
    group = ".".join(module.split(".")[1:-1])
    row = ListedPlugin(name, distribution, version, group)
    path = _find_module(module)
    if path is None:
        return dataclasses.replace(row, summary=f"cannot be found: there is no module {module}")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError) as error:
        return dataclasses.replace(row, summary=f"cannot be read: {path.name}: {clause(error)}")
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    facts = _class_facts(tree, cls)
    return dataclasses.replace(row, summary=summary, slot=facts.get("slot"), numerics=facts.get("numerics"))


def _class_facts(tree: ast.Module, name: str) -> dict[str, str | None]:
    """``slot`` and ``numerics`` of a class, from the source text of its module and of those of its bases.

    For ``class Own(TimedStrategy)``, whose base has ``class TimedStrategy(Strategy)``, those of ``Strategy`` are the
    usual ones, and literals in either class replace them.
    """
    from fastloop.recipe.plugin_references import read_literals

    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    bases = [name]  # the module imports the class
    if node is not None:
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    facts: dict[str, str | None] = {}
    for base in bases:
        if base == "Plugin":
            facts = {"slot": Plugin.slot, "numerics": NOT_DECLARED}
        elif base == "Strategy":
            facts = {"slot": Strategy.slot, "numerics": NOT_DECLARED}
        else:
            path = _find_import(tree, base)
            if path is not None:
                with suppress(OSError, SyntaxError, RecursionError):
                    facts = _class_facts(ast.parse(path.read_bytes(), str(path)), base)
    literals = {} if node is None else read_literals(node)
    for key in ("slot", "numerics"):
        if key in literals and isinstance(literals[key], str | None):
            facts[key] = literals[key]
    promises = literals.get("read_only") is True or facts.get("slot") == "task"
    if promises and facts.get("numerics") == NOT_DECLARED:
        facts["numerics"] = Plugin.numerics
    return facts


def _find_import(tree: ast.Module, name: str) -> Path | None:
    """The file that a module imports a name from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported = [alias.asname or alias.name for alias in node.names]
            if name in imported:
                return _find_module(node.module)
    return None


def _find_module(name: str) -> Path | None:
    """The file of a module on the import path, found without importing its package. A module ``a.b`` is a/b.py, or
    a/b/__init__.py; a file a/b.py in any folder of the path comes first."""
    relative = name.replace(".", "/")
    for file in (f"{relative}.py", f"{relative}/__init__.py"):
        for folder in sys.path:
            path = Path(folder or ".") / file
            if path.is_file():
                return path
    return None


def packages_without_plugins() -> list[str]:
    """A sentence about each installed package that has the keyword, but no entry point for a plugin."""
    sentences = []
    for package in distributions():
        with suppress(UnicodeDecodeError):  # metadata that is not UTF-8
            has_keyword = re.search(rf"(?im)^Keywords:.*\b{KEYWORD}\b", package.read_text("METADATA") or "")
            if has_keyword and not package.entry_points.select(group=GROUP):
                sentences.append(
                    f"{package.name} {package.version} has the keyword {KEYWORD}, but no entry point in the group "
                    f"{GROUP}."
                )
    return sentences


def hooks_of(cls: type[Plugin]) -> list[str]:
    """The hooks that a plugin implements, in firing order; then those that other plugins declare."""
    from fastloop import hookspecs

    marked = [name for name in dir(cls) if hasattr(getattr(cls, name), "fastloop_impl")]
    of_core = [name for name in vars(hookspecs) if name in marked]
    of_plugins = [name for name in marked if name not in of_core]
    return of_core + of_plugins


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
    import textwrap

    from fastloop.cli.recipe_schema import docstring

    text = docstring(cls)
    indented_blocks = re.findall(r"(?m)(?:^ {4}.*\n?)(?:(?:^ {4}.*|^[ ]*)\n?)*", text)
    for block in indented_blocks:
        if re.search(r"(?m)^ {4}plugins:", block):
            return text.replace(block, "").strip(), textwrap.dedent(block).strip()
    return text.strip(), f"plugins:\n  - {cls.name}"


def show(name: str, as_json: bool) -> None:
    """Import a plugin and print its documentation, declarations, options with types and defaults, and a recipe."""
    from fastloop.cli.option_table import describe
    from fastloop.plugins.declared_options import options_of
    from fastloop.plugins.installed import find_entry_point, load

    cls = load(name, "fastloop plugins")
    options = describe(options_of(cls))
    text, recipe = documentation(cls)
    row = listing(cls.name, find_entry_point(name, "fastloop plugins"))
    if not as_json:
        typer.echo(f"{cls.name} ({row.package})\n")
        typer.echo(_wrapped(text))
        _show_declarations(cls)
        _show_options(options)
        typer.echo(f"\nIn a recipe:\n\n{recipe}")
        return
    facts = {
        **dataclasses.asdict(row),
        "description": cls.description,
        "requirements": _requirements(cls),
        "requires": list(cls.requires),
        "conflicts": dict(cls.conflicts),
        "hooks": hooks_of(cls),
        "runs_after": list(cls.runs_after),
        "runs_before": list(cls.runs_before),
        "options": [vars(option) for option in options],
        "recipe": recipe,
    }
    typer.echo(json.dumps(facts, indent=2))


def _requirements(cls: type[Plugin]) -> list[str]:
    """The requirements of a plugin in a few words, each once."""
    return list(dict.fromkeys(map(requirement, cls.requirements)))


def _show_declarations(cls: type[Plugin]) -> None:
    """Print a plugin's declarations as a table, without empty rows."""
    from rich.markup import escape

    hooks = [f"{hook} (wraps it)" if is_wrapper(cls, hook) else hook for hook in hooks_of(cls)]
    rows: dict[str, Iterable[str]] = {
        "in a run": [cls.description],
        "slot": [cls.slot or "none"],
        "numerics": [shown_numerics(cls)],
        "requirements": _requirements(cls),
        "requires": cls.requires,
        "conflicts": [f"{other}: {reason}" for other, reason in cls.conflicts.items()],
        "hooks": [", ".join(hooks)],
        "runs_after": [", ".join(cls.runs_after)],
        "runs_before": [", ".join(cls.runs_before)],
    }
    table = _table("", "")
    table.show_header = False
    for key, values in rows.items():
        lines = [value for value in values if value]
        if lines:
            table.add_row(key, escape("\n".join(lines)))
    typer.echo()
    print_table(table)


def _show_options(options: Sequence[OptionInfo]) -> None:
    """Print a plugin's options as a table; nothing if it has none."""
    from rich.markup import escape

    if not options:
        return
    table = _table("option", "type", "default", "what it does")
    for column in table.columns[1:]:
        column.no_wrap = False
    for option in options:
        table.add_row(*(escape(cell) for cell in vars(option).values()))  # list[str] is no markup
    typer.echo()
    print_table(table)


def _wrapped(text: str) -> str:
    """Paragraphs that fit the terminal; into a file or a pipe, each is one line. Lists and code keep their lines."""
    import textwrap

    import rich

    console = rich.get_console()
    shown = []
    for paragraph in re.split(r"\n{2,}", text):
        keeps_lines = re.search(r"(?m)^(?: |[*-] )", paragraph)
        if keeps_lines:
            shown.append(paragraph)
        elif console.is_terminal:
            shown.append(textwrap.fill(paragraph, console.width))
        else:
            shown.append(" ".join(paragraph.split()))
    return "\n\n".join(shown)
