"""Check that a package's README and metadata match the plugin's code, and not the template of ``fastloop new``.

For a package that is installed as a wheel, the check reads its metadata. For an editable install, it reads the
project's files, because the metadata may be outdated.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fastloop.cli.option_table import OptionInfo, describe
from fastloop.errors import PluginError, RecipeError
from fastloop.plugins.installed import GROUP, load
from fastloop.plugins.plugin import Plugin
from fastloop.recipe import safe_yaml


class Problem(NamedTuple):
    """A contradiction between a plugin and its documents."""

    promised: str
    found: str
    fix: str


@dataclass(frozen=True)
class Documents:
    """The documents of a package.

    Attributes:
        readme: Text of the README; empty if the package has none.
        description: The one-line summary in the metadata.
    """

    readme: str
    description: str

    @classmethod
    def of(cls, distribution: importlib.metadata.Distribution) -> Documents:
        """The documents of an installed package."""
        metadata = distribution.metadata.json
        installed = cls(str(metadata.get("description", "")), str(metadata.get("summary", "")))
        source = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not source.get("dir_info", {}).get("editable"):
            return installed
        project_file = Path(url2pathname(urlsplit(source["url"]).path), "pyproject.toml")
        if not project_file.is_file():
            return installed
        project = tomllib.loads(project_file.read_text(encoding="utf-8")).get("project", {})
        entry = project.get("readme")
        path = entry.get("file") if isinstance(entry, dict) else entry
        file = project_file.parent / str(path)
        readme = file.read_text(encoding="utf-8") if path and file.is_file() else installed.readme
        return cls(readme, project.get("description", installed.description))


def problems(cls: type[Plugin], distribution: importlib.metadata.Distribution) -> Iterator[Problem]:
    """Contradictions between a plugin and the documents of its package. A package without a README has no documents to
    check."""
    documents = Documents.of(distribution)
    if documents.readme:
        yield from _option_problems(cls, documents.readme, distribution)
        if cls.slot != "task" and f"`{cls.numerics}`" not in documents.readme:  # no run without a task to compare with
            yield Problem(
                f"its numerics class in the README: `{cls.numerics}`",
                "another one, or none",
                "Name the class that the plugin declares, in backquotes",
            )
    yield from _leftovers(cls, documents)


# -- options -----------------------------------------------------------------------------------------------------------


def _option_problems(
    cls: type[Plugin], readme: str, distribution: importlib.metadata.Distribution
) -> Iterator[Problem]:
    rows, own = option_rows(readme), describe(cls.Config)
    if missing := [option.name for option in own if option.name not in rows]:
        yield Problem(
            "a table of its options in the README", f"no row for {', '.join(missing)}", "Rows begin with: | `option` |"
        )
    names = [point.name for point in distribution.entry_points if point.group == GROUP]
    known = {option.name for name in names for option in _options_of(name)}
    if unknown := [name for name in rows if name not in known]:
        fix = f"Remove the row, or declare the option in {cls.__qualname__}.Config"
        yield Problem("its own options in the README", f"a row for {', '.join(unknown)}, which is no option", fix)
    for option in own if len(names) == 1 else ():
        shown = rows.get(option.name, {}).get("default", "")
        if shown and not _same_default(shown, option.default):
            fix = f"Write {option.default} there, or change the default in {cls.__qualname__}.Config"
            yield Problem(f"the default of its option {option.name!r} in the README: {option.default}", shown, fix)


def _options_of(name: str) -> list[OptionInfo]:
    try:
        return describe(load(name).Config)
    except PluginError:  # its own tests report it
        return []


def option_rows(readme: str) -> dict[str, dict[str, str]]:
    """Option -> column in lower case -> cell, from every table of a README whose first column is ``option``."""
    rows: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in readme.splitlines():
        cells = [cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not line.strip().startswith("|"):
            columns = []
        elif not columns:
            columns = [cell.lower() for cell in cells]
        elif columns[0] == "option" and not set("".join(cells)) <= set(":- "):
            rows[cells[0]] = dict(zip(columns, cells, strict=False))
    return rows


def _same_default(shown: str, default: str) -> bool:
    if shown == default or default == "(required)":
        return True
    try:
        value: Any = safe_yaml.load(shown, "default")
        return str("null" if value is None else value) == default or float(shown) == float(default)
    except (RecipeError, ValueError):
        return False


# -- template of `fastloop new` ----------------------------------------------------------------------------------------


def _leftovers(cls: type[Plugin], documents: Documents) -> Iterator[Problem]:
    """Texts of the template in a package whose plugin differs from the template's."""
    from fastloop_tools.new.command import render

    files = render(cls.name, task=cls.slot == "task")
    example = ast.parse(files[f"src/{cls.name.replace('-', '_')}/__init__.py"])
    *_, template = (node for node in example.body if isinstance(node, ast.ClassDef))
    if _methods(template) == _methods(ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]):
        return
    purpose = (ast.get_docstring(example) or "").partition("\n")[0].rstrip(".")
    assigned = (
        (node.value, target) for node in template.body if isinstance(node, ast.Assign) for target in node.targets
    )
    values = {target.id: value for value, target in assigned if isinstance(target, ast.Name)}
    is_stale = {
        "the description in pyproject.toml": documents.description
        == tomllib.loads(files["pyproject.toml"])["project"]["description"],
        "README.md": purpose.lower() in " ".join(documents.readme.split()).lower(),
        f"the docstring of {cls.__module__}": purpose in (inspect.getdoc(sys.modules[cls.__module__]) or ""),
        "`description`": cls.description == ast.literal_eval(values["description"]),
        f"the docstring of {cls.__qualname__}": (cls.__doc__ or "") == ast.get_docstring(template),
    }
    if places := [place for place, stale in is_stale.items() if stale]:
        yield Problem(
            "to describe what it does",
            f"the text of `fastloop new` in {', '.join(places)}",
            "Describe this plugin there",
        )


def _methods(cls: ast.AST) -> dict[str, str]:
    """Method -> its syntax tree as text."""
    body = cls.body if isinstance(cls, ast.ClassDef) else []
    return {node.name: ast.dump(node) for node in body if isinstance(node, ast.FunctionDef)}
