"""What a file of plugins declares, read from its text: nothing of it runs."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """A file.

    Attributes:
        summary: First line of its docstring.
        classes: Each class at the top level -> the names that its body gives a literal value, such as ``name``, ``slot`` and ``numerics``.
        bases: The same class -> its base classes, as written and without their module.
    """

    summary: str = ""
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)

    def plugins(self) -> dict[str, str]:
        """Class -> plugin name of those that are plugins by their looks: they have a base class and a literal ``name``."""
        names = {cls: declared.get("name") for cls, declared in self.classes.items() if self.bases[cls]}
        return {cls: name for cls, name in names.items() if isinstance(name, str) and name}


def read(path: Path) -> Source:
    """Read a file.

    Raises:
        OSError: It cannot be opened.
        SyntaxError: It is not Python; also for bytes that are no text.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    found = Source((ast.get_docstring(tree) or "").partition("\n")[0])
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            found.classes[node.name] = declared = {}
            for item in node.body:
                if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Constant):
                    target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                    if isinstance(target, ast.Name):
                        declared[target.id] = item.value.value
    return found


def split(reference: str) -> tuple[str, str] | None:
    """``file.py`` or ``file.py:Class`` -> the file and the class (or ''); None for a reference to something else."""
    if reference.endswith(".py"):
        return reference, ""
    home, _, cls = reference.rpartition(":")
    return (home, cls) if home.endswith(".py") else None
