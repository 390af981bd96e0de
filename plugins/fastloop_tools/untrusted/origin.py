"""Where a name would be imported from: its file, and the installed package that lists the file. Imports nothing.

``importlib.util.find_spec("a.b")`` imports ``a``. This module therefore finds each part of a dotted name in the folders of the part before
it. It does not call finders that packages add to ``sys.meta_path``. A package is installed if its ``RECORD`` lists the file. A
package in editable mode is installed if its ``.pth`` file adds the file's folder to the import path.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from importlib.metadata import Distribution, distributions
from importlib.util import resolve_name
from pathlib import Path
from pkgutil import get_importer
from typing import Any

from fastloop.plugin import name_and_version

HOPS = 10
"""Number of ``from module import name`` statements to follow. Installed packages need two or three."""


@dataclass(frozen=True)
class Origin:
    """Where a module or name would be imported from.

    Attributes:
        module: Name of the innermost module that was found.
        file: Its file; empty for a module inside the interpreter.
        line: Line of the definition of the name; 0: unknown.
        package: Name of the installed package; empty if there is none.
        version: Version of that package.
        problem: Why it is not installed; empty if it is.
    """

    module: str
    file: str = ""
    line: int = 0
    package: str = ""
    version: str = ""
    problem: str = ""


def find_module(module: str) -> Origin | None:
    """Find a module; None if there is no module or package of this name."""
    specs = list(_specs(module))
    files = [(spec.name, spec.origin or "", spec.has_location) for spec in specs if spec.loader is not None and spec.origin is not None]
    if not files:
        return None
    found = Origin(module=files[-1][0], file=files[-1][1] if files[-1][2] else "")
    for name, file, is_file in files:
        owner = _owner(Path(file).absolute()) if is_file else None
        if owner is None:
            return replace(found, problem=_explain(name, file, is_file))
        found = replace(found, package=owner[0], version=owner[1])
    if specs[-1].name != module:
        return replace(found, problem=f"{found.package} {found.version} has no module {module}")
    return found


def find_name(module: str, name: str) -> Origin | None:
    """Find the definition of a name, also if the module imports it from another one; None: there is no such module."""
    found = find_module(module)
    for _ in range(HOPS):
        if found is None or found.problem or not found.file.endswith(".py"):
            return found
        node = _binding(Path(found.file), name)
        if not isinstance(node, ast.ImportFrom):
            return found if node is None else replace(found, line=node.lineno)
        name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        is_package = Path(found.file).stem == "__init__"
        home = found.module if is_package else found.module.rpartition(".")[0]
        source = resolve_name("." * node.level + (node.module or ""), home) if node.level else node.module or ""
        following = find_module(source)
        if following is None:
            return found
        found = following
    return found


def module_file(module: str) -> str:
    """The file of a module; empty if there is no such module, or if it has no file."""
    specs = list(_specs(module))
    complete = bool(specs) and specs[-1].name == module and specs[-1].has_location
    return str(specs[-1].origin) if complete else ""


def on_import_path(folder: Path) -> bool:
    """Whether Python imports modules from a folder."""
    return folder.resolve() in {Path(entry).resolve() for entry in sys.path}


def _specs(module: str) -> Iterator[ModuleSpec]:
    """The specs of a module's parents and its own, outermost first, up to the first that is not found."""
    name: str = ""
    path: list[str] | None = None
    if "\0" in module or not all(module.split(".")):
        return
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = _find(name, path)
        if found is None:
            return
        yield found
        if found.submodule_search_locations is None:
            return
        path = list(found.submodule_search_locations)


def _find(name: str, path: list[str] | None) -> ModuleSpec | None:
    """The spec of a module in the folders of its parent; None: of ``sys.path``.

    ``PathFinder.find_spec`` would need the parent of a nested namespace package to be imported.
    """
    for importer in (BuiltinImporter, FrozenImporter):
        if (found := importer.find_spec(name, path)) is not None:
            return found
    portions: list[str] = []
    for folder in sys.path if path is None else path:
        finder: Any = get_importer(folder or str(Path.cwd()))
        spec: ModuleSpec | None = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec is not None else []
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _explain(module: str, file: str, is_file: bool) -> str:
    """Why a module is not of an installed package."""
    path = Path(file)
    if not is_file or (path.is_relative_to(sysconfig.get_path("stdlib")) and not {"site-packages", "dist-packages"} & set(path.parts)):
        return f"module {module} is of Python's standard library, whose functions can run any command"
    return f"no installed package lists the file {file}"


@cache
def _owner(file: Path) -> tuple[str, str] | None:
    """Name and version of the installed package that a file belongs to."""
    for package in distributions():
        base = Path(str(package.locate_file(""))).absolute()
        if file.is_relative_to(base) and f"\n{file.relative_to(base).as_posix()}," in "\n" + (package.read_text("RECORD") or ""):
            return name_and_version(package)
        if any(file.is_relative_to(folder) for folder in _editable_folders(package)):
            return name_and_version(package)
    return None


def _editable_folders(package: Distribution) -> Iterator[Path]:
    """The folders that an editable installation adds to the import path."""
    installed_from = json.loads(package.read_text("direct_url.json") or "{}")
    if not installed_from.get("dir_info", {}).get("editable"):
        return
    for file in package.files or ():
        if file.suffix == ".pth":
            for line in file.read_text(encoding="utf-8").splitlines():
                if line and not line.startswith(("import", "#")):
                    yield Path(line).absolute()


def _binding(file: Path, name: str) -> ast.stmt | None:
    """The last statement of a module's text that binds a name; None if the text has none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return next((node for node in reversed(list(_statements(tree.body))) if name in _bound(node)), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those in ``if`` and ``try``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign():
            return {node.target.id} if isinstance(node.target, ast.Name) else set()
    return set()
