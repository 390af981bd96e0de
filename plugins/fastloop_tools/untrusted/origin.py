"""Where a name would be imported from: its file, and the installed package that lists the file. Imports nothing.

``importlib.util.find_spec("a.b")`` imports ``a``. This module therefore finds each part of a dotted name in the folders
of the part before it. It does not call finders that packages add to ``sys.meta_path``. A package is installed if its
``RECORD`` lists the file. A package in editable mode is installed if its ``.pth`` file adds the file's folder to the
import path.
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

from fastloop.plugins.installed import name_and_version

MAX_PATHS = 200
"""Names to follow for one reference at most. Installed packages need two or three."""
CODE_OF_PYTHON = ("__import__", "compile", "eval", "exec", "open")
"""Built-in functions that run or write anything that their arguments name."""


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
    found = _innermost(module)
    if found is None or found[0].problem or found[1]:
        return found[0] if found else None
    return replace(found[0], problem=f"{found[0].package} {found[0].version} has no module {module}")


def _innermost(module: str) -> tuple[Origin, bool] | None:
    """The innermost part of a module's name that is found, and whether that is the whole name."""
    specs = list(_specs(module))
    files = [
        (spec.name, spec.origin or "", spec.has_location)
        for spec in specs
        if spec.loader is not None and spec.origin is not None
    ]
    if not files:
        return None
    found = Origin(module=files[-1][0], file=files[-1][1] if files[-1][2] else "")
    for name, file, is_file in files:
        owner = _owner(Path(file).absolute()) if is_file else None
        if owner is None:
            return replace(found, problem=_explain(name, file, is_file)), False
        found = replace(found, package=owner[0], version=owner[1])
    return found, specs[-1].name == module


def find_name(module: str, name: str) -> Origin | None:
    """Find the object that a name of a module stands for; None: there is no such module.

    Imports, assignments (``load = other.load``) and arguments of calls (``partial(load)``) are followed. If a name has
    several bindings, such as those of ``if`` and ``else``, one that is not installed decides.
    """
    found = find_module(module)
    return found if found is None or found.problem else _follow(module, (name,), set()) or found


def _follow(module: str, names: tuple[str, ...], seen: set[tuple[str, ...]]) -> Origin | None:
    """Find the object ``module.name.name``, or as much of the path as the texts show; None: they do not show the first
    name.

    Args:
        seen: The paths on the way so far, to end at a circle. At most ``MAX_PATHS``.
    """
    found, complete = _innermost(module) or (None, False)
    if found is None or found.problem or not complete or not names or not found.file.endswith(".py"):
        return found  # not complete: an attribute of compiled code
    if (module, *names) in seen or len(seen) >= MAX_PATHS:
        return None
    seen.add((module, *names))
    nodes = _bindings(Path(found.file), names[0])
    targets = [target for node in nodes for target in _targets(node, found, names)]
    if (
        not nodes
        and (inner := find_module(f"{module}.{names[0]}")) is not None
        and inner.module == f"{module}.{names[0]}"
    ):
        targets = [(inner.module, names[1:])]
    elif not nodes:
        targets = [target for node in _bindings(Path(found.file), "*") for target in _targets(node, found, names)]
    origins = [origin for target in targets if (origin := _follow(*target, seen)) is not None]
    refused = next((origin for origin in origins if origin.problem), None)
    if refused or not nodes or (origins and not _defines(nodes[-1])):
        return refused or (origins[-1] if origins else None)
    return replace(found, line=nodes[-1].lineno)


def _targets(node: ast.stmt, found: Origin, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The modules, and paths in them, that a statement binds to ``names[0]``; for an assignment also those in arguments
    of calls."""
    if isinstance(node, ast.ImportFrom):
        home = found.module if Path(found.file).stem == "__init__" else found.module.rpartition(".")[0]
        source = resolve_name("." * node.level + (node.module or ""), home) if node.level else node.module or ""
        for alias in node.names:
            if alias.name == "*":
                yield source, names
            elif (alias.asname or alias.name) == names[0]:
                yield source, (alias.name, *names[1:])
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname == names[0]:
                yield alias.name, names[1:]
            elif alias.asname is None and alias.name.partition(".")[0] == names[0]:
                yield names[0], names[1:]
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for path in _paths(node.value):
            if path[0] in CODE_OF_PYTHON and not _bindings(Path(found.file), path[0]):
                yield "builtins", path
            else:
                yield found.module, (*path, *names[1:])


def _paths(value: ast.expr) -> Iterator[tuple[str, ...]]:
    """The dotted names in an expression, such as ``("pickle", "loads")``, without the functions that it calls."""
    node, names = value, []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        yield (node.id, *reversed(names))
        return
    parts = (
        [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node, ast.Call)
        else ast.iter_child_nodes(node)
    )
    for part in parts:
        if isinstance(part, ast.expr):
            yield from _paths(part)


def _defines(node: ast.stmt) -> bool:
    """Whether a statement defines an object itself, and does not only name another one."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return not isinstance(node.value, ast.Name | ast.Attribute | ast.Constant)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


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
    if not is_file or (
        path.is_relative_to(sysconfig.get_path("stdlib")) and not {"site-packages", "dist-packages"} & set(path.parts)
    ):
        return f"module {module} is of Python's standard library, whose functions can run any command"
    return f"no installed package lists the file {file}"


@cache
def _owner(file: Path) -> tuple[str, str] | None:
    """Name and version of the installed package that a file belongs to."""
    for package in distributions():
        base = Path(str(package.locate_file(""))).absolute()
        if file.is_relative_to(base) and f"\n{file.relative_to(base).as_posix()}," in "\n" + (
            package.read_text("RECORD") or ""
        ):
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


def _bindings(file: Path, name: str) -> list[ast.stmt]:
    """The statements of a module's text that bind a name. ``*``: the imports of all names of another module."""
    return [node for node in _statements(_body(file)) if name in _bound(node)]


@cache
def _body(file: Path) -> list[ast.stmt]:
    """The statements of a file; none if it cannot be read."""
    try:
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those in ``if`` and ``try``.

    Imports of all names for type checkers are left out: modules that load on demand have hundreds of them.
    """
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (part for part in _statements(node.body) if "*" not in _bound(part))
            yield from _statements(node.orelse)
            continue
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
        case ast.Import():
            return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        case ast.Assign():
            return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        case ast.AnnAssign():
            return {node.target.id} if isinstance(node.target, ast.Name) else set()
    return set()
