"""The effects of code outside of training, such as commands and network access, found in its text.

Runs and imports nothing.

The text of a module shows which modules it imports, also inside of functions. The scan follows imports within the same
top-level package. It cannot find an import that the text does not name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from fastloop_tools.untrusted.origin import module_file

MODULES = {
    "accelerate.tracking": "sends values to experiment trackers",
    "cffi": "calls native code",
    "ctypes": "calls native code",
    "deepspeed": "starts a compiler",
    "fsspec": "uses the network",
    "http": "uses the network",
    "httpx": "uses the network",
    "huggingface_hub": "uses the network",
    "multiprocessing": "starts processes",
    "pickle": "reads or writes pickles",
    "pty": "starts commands",
    "requests": "uses the network",
    "socket": "uses the network",
    "subprocess": "starts commands",
    "torch._dynamo": "starts a compiler",
    "torch.utils.cpp_extension": "starts a compiler",
    "urllib.request": "uses the network",
}
"""Imported module -> its effect."""
CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "os.execv": "starts commands",
    "os.execve": "starts commands",
    "os.fork": "starts processes",
    "os.popen": "starts commands",
    "os.posix_spawn": "starts commands",
    "os.system": "starts commands",
    "torch.compile": "starts a compiler",
}
"""Called function -> its effect."""
HOOKS = {"environment": "sets environment variables, and starts fastloop again with them"}
"""Hook of a plugin -> its effect."""
MAX_FILES = 200
"""Files to read for one module at most. Our plugin with the most imports reads fewer than 60, and 200 files take about
1 s."""


def effects(module: str) -> dict[str, str]:
    """Effect -> the file whose text shows it.

    Args:
        module: The module to begin with, and its parents. Other modules of its top-level package are read if an import
            of them is found.
    """
    package = module.partition(".")[0]
    found: dict[str, str] = {}
    waiting = list(_with_parents(module))
    seen = set(waiting)
    files = 0
    while waiting:
        name = waiting.pop(0)
        file = module_file(name)
        if not file:
            continue
        files += 1
        if files > MAX_FILES:
            found[f"imports more than {MAX_FILES} files, and the rest was not read"] = file
            break
        here, imported = _scan(name, file)
        for effect in here:
            found.setdefault(effect, file)
        for other in imported:
            new = (
                [part for part in _with_parents(other) if part not in seen]
                if other.partition(".")[0] == package
                else []
            )
            seen.update(new)
            waiting += new
    return dict(sorted(found.items()))


@cache
def _scan(module: str, file: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """The effects that the text of one file shows, and the modules that it imports."""
    if not file.endswith(".py"):
        return frozenset({"is compiled code, which cannot be read"}), ()
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return frozenset({"cannot be read as Python"}), ()
    imported = tuple(_imports(tree, module, is_package=Path(file).stem == "__init__"))
    return frozenset(filter(None, (*map(_effect, imported), *_calls(tree)))), imported


def _with_parents(module: str) -> Iterator[str]:
    """``a.b.c`` as ``a``, ``a.b`` and ``a.b.c``: Python imports them in this order."""
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _effect(module: str) -> str | None:
    """The effect of importing a module or one of its parents."""
    return next((MODULES[name] for name in _with_parents(module) if name in MODULES), None)


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """The modules that a text imports. Of ``from a import b``, both ``a`` and ``a.b``, since ``b`` may be a module.

    Imports for type checkers (``if TYPE_CHECKING:``) are left out.
    """
    home = module if is_package else module.rpartition(".")[0]
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for part in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level and home:
                source = resolve_name("." * node.level + source, home)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _calls(tree: ast.Module) -> Iterator[str]:
    """The effects of the functions that a text calls, and of the hooks that its classes have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield CALLS.get(ast.unparse(node.func), "")
        if isinstance(node, ast.ClassDef):
            yield from (HOOKS.get(getattr(item, "name", ""), "") for item in node.body)
