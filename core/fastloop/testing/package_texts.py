"""The texts of a plugin's package, compared with its class: README.md, pyproject.toml and recipe.yaml.

`fastloop new plugin` writes them for an example plugin, and nothing else would notice that they still describe it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.plugins.declared_options import options_of
from fastloop.plugins.plugin import Plugin
from fastloop.recipe import safe_yaml

GROUP = "fastloop.plugins"
"""The group of entry points."""
DEPTH = 4
"""Folders above a module in which its pyproject.toml may be: src/name/module.py has it two folders above."""
SENTENCE = re.compile(r"A fastloop (?:plugin|task) that ([^.\n]*)")
"""The description in a package of `fastloop new`."""
NUMERICS = re.compile(r"numerics class `([\w-]+)`", re.IGNORECASE)
ROW = re.compile(r"\| *`([^`]+)` *\|")
"""A row of a table: ``| `every` | int |``."""


@dataclass(frozen=True)
class SourcePackage:
    """The package of a plugin, in its source folder.

    Attributes:
        folder: The folder with pyproject.toml.
        project: The table ``project`` of this file.
        is_alone: Whether the plugin is the only one of the package, so that all texts are about it.
    """

    folder: Path
    project: dict[str, Any]
    is_alone: bool


def leftovers(cls: type[Plugin]) -> list[str]:
    """The places where the texts of a plugin's package contradict its class. Empty for a plugin without source folder,
    such as one of an installed wheel."""
    package = find_package(cls)
    if package is None:
        return []
    description = str(package.project.get("description", ""))
    all_problems = []
    if package.is_alone:
        all_problems += [f"pyproject.toml: description: {problem}" for problem in _other_sentence(description, cls)]
    readme = package.folder / "README.md"
    if readme.is_file():
        for number, line in enumerate(readme.read_text(encoding="utf-8").splitlines(), start=1):
            problems = list(_problems_of_line(line, cls, package.is_alone))
            all_problems += [f"README.md, line {number}: {problem}" for problem in problems]
        all_problems += [f"README.md: {problem}" for problem in _other_table(readme, cls, package.is_alone)]
    recipe = package.folder / "recipe.yaml"
    if recipe.is_file():
        for number, line in enumerate(recipe.read_text(encoding="utf-8").splitlines(), start=1):
            all_problems += [f"recipe.yaml, line {number}: {problem}" for problem in _other_options(line, cls)]
    return all_problems


def find_package(cls: type[Plugin]) -> SourcePackage | None:
    """The package whose pyproject.toml registers a plugin, above the file of its class; None: there is none."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return None
    for folder in list(Path(file).resolve().parents)[:DEPTH]:
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        except (OSError, ValueError):
            return None
        plugins = project.get("entry-points", {}).get(GROUP, {})
        return SourcePackage(folder, project, len(plugins) == 1) if cls.name in plugins else None
    return None


def _problems_of_line(line: str, cls: type[Plugin], is_alone: bool) -> Iterator[str]:
    """Yield how a line of README.md contradicts the class."""
    yield from _other_options(line, cls)
    if not is_alone:
        return
    yield from _other_sentence(line, cls)
    for name in NUMERICS.findall(line):
        if name != cls.numerics:
            yield f"the numerics class {name!r}, and the class declares {cls.numerics!r}"
    if "summary.json" in line and f'"{cls.name}"' in line and not hasattr(cls, "write_summary"):
        yield "an entry in summary.json, and the plugin has no hook write_summary"


def _other_sentence(text: str, cls: type[Plugin]) -> Iterator[str]:
    """Yield the description of another plugin. The class has it in the first sentence of its docstring."""
    match = SENTENCE.search(text)
    if match is None:
        return
    described = match[1].strip().removesuffix(".")
    own = cls.description[:1].lower() + cls.description[1:]
    if " ".join(described.split()) != " ".join(own.partition(".")[0].split()):
        yield f"it {described!r}, and the docstring of the class says {cls.description!r}"


def _other_options(line: str, cls: type[Plugin]) -> Iterator[str]:
    """Yield options in a line of a recipe, ``- name: {every: 10}``, that the plugin does not have."""
    match = re.match(rf"\s*- {re.escape(cls.name)}: *(\{{.*\}})", line)
    if match is None:
        return
    try:
        given = safe_yaml.load(match[1], "README.md")
    except Exception:  # such as {...}, which only stands for options
        return
    if not isinstance(given, dict):
        return
    known = _option_names(cls)
    for name in given:
        if name not in known:
            yield f"the option {name!r}, which the plugin does not have"


def _other_table(readme: Path, cls: type[Plugin], is_alone: bool) -> Iterator[str]:
    """Yield the rows of a table of options that are none of the plugin."""
    if not is_alone:
        return
    known = _option_names(cls)
    in_table = False
    for line in readme.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| *option *\|", line):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        row = ROW.match(line)
        if in_table and row is not None and row[1] not in known:
            yield f"the table of options has {row[1]!r}, which the plugin does not have"


def _option_names(cls: type[Plugin]) -> Collection[str]:
    return [field.name for field in dataclasses.fields(options_of(cls))]
