"""Finds attributes that a class sets in a method without having declared them, from the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

CONSTRUCTORS = ("__init__", "__post_init__")


@dataclass
class ParsedClass:
    """A class of the source.

    Attributes:
        declared: Names that its body or its constructor has.
        set_later: Attribute -> the line where another method sets it first.
    """

    name: str
    bases: list[str] = field(default_factory=list)
    declared: set[str] = field(default_factory=set)
    set_later: dict[str, int] = field(default_factory=dict)


def parse_classes(tree: ast.Module) -> Iterator[ParsedClass]:
    """Yield the classes of a parsed file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield _parse_class(node)


def undeclared(parsed: ParsedClass, classes: dict[str, ParsedClass]) -> dict[str, int]:
    """Attribute -> line, for those that neither the class nor one of its bases declares. Empty for a class with a base
    that is not in ``classes``: a library's attributes are not known."""
    declared: set[str] = set()
    waiting = [parsed]
    while waiting:
        one = waiting.pop()
        declared |= one.declared
        for base in one.bases:
            if base in classes:
                waiting.append(classes[base])
            elif base not in ("object", "Generic", "Protocol", "Exception", "Sequence", "Iterator", "Mapping"):
                return {}
    return {name: line for name, line in parsed.set_later.items() if name not in declared}


def _parse_class(node: ast.ClassDef) -> ParsedClass:
    parsed = ParsedClass(node.name)
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        parsed.bases.append(ast.unparse(name).rpartition(".")[2])
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            parsed.declared.add(statement.name)
            for attribute in _attributes_set(statement):
                if statement.name in CONSTRUCTORS:
                    parsed.declared.add(attribute.attr)
                else:
                    parsed.set_later.setdefault(attribute.attr, attribute.lineno)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            parsed.declared |= {name.id for name in ast.walk(statement) if isinstance(name, ast.Name)}
    return parsed


def _attributes_set(function: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each ``self.name`` that a function assigns."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node
