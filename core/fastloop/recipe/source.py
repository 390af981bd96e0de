"""Read the declarations in a file of plugins without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """The declarations in a file.

    Attributes:
        summary: First line of the docstring.
        classes: Top-level class -> its attributes with literal values, such as ``name``, ``slot`` and ``numerics``.
        bases: Top-level class -> names of its base classes, without modules.
    """

    summary: str = ""
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)

    def plugins(self) -> dict[str, str]:
        """Class -> plugin name, for classes with a base class and a literal ``name``."""
        names = {cls: declared.get("name") for cls, declared in self.classes.items() if self.bases[cls]}
        return {cls: name for cls, name in names.items() if isinstance(name, str) and name}


def read(path: Path) -> Source:
    """Parse a file.

    Raises:
        OSError: The file cannot be opened.
        SyntaxError: The file is not Python, or not text.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    source = Source((ast.get_docstring(tree) or "").partition("\n")[0])
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            source.bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            source.classes[node.name] = declared = {}
            for item in node.body:
                if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Constant):
                    target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                    if isinstance(target, ast.Name):
                        declared[target.id] = item.value.value
    return source


def split(reference: str) -> tuple[str, str] | None:
    """Split ``file.py`` or ``file.py:Class`` into the file and the class (or ''). None: not a reference to a file."""
    if reference.endswith(".py"):
        return reference, ""
    home, _, cls = reference.rpartition(":")
    return (home, cls) if home.endswith(".py") else None
