"""The types of ``run.hooks``: core/fastloop/hook_types.pyi, written from the hook specifications.

``_sources.py`` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastloop import hookspecs
from fastloop.core_modules import MODULES

STUB = Path(hookspecs.__file__).with_name("hook_types.pyi")
WIDTH = 120
"""Characters of a line, as in ruff's settings."""
HEAD = '''"""The types of `run.hooks`. Made by `make docs-sources` from hookspecs.py: edit that file."""
'''
CLASS = '''
class HookTypes:
    """Every hook of the core as `run.hooks` calls it: arguments by name."""
'''


def specs() -> dict[str, Any]:
    """Every hook's specification, in order."""
    return {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")}


def is_implemented(name: str) -> bool:
    """Whether fastloop itself implements a hook, beside its plugins."""
    functions = [
        (key, getattr(value, "fastloop_impl", None)) for module in MODULES for key, value in vars(module).items()
    ]
    return any(marks and not marks["wrapper"] and (marks["specname"] or key) == name for key, marks in functions)


def result(name: str, spec: Any) -> str:
    """The type that a call of a hook returns.

    A *first* hook returns None only if fastloop does not implement it. Other hooks return the results that are not
    None.
    """
    annotation = str(inspect.signature(spec).return_annotation)
    present = annotation.removesuffix(" | None")
    if spec.fastloop_spec["firstresult"]:
        return present if is_implemented(name) else annotation
    return "None" if annotation == "None" else f"list[{present}]"


def hook_types() -> str:
    """The text of the stub."""
    methods = []
    for name, spec in specs().items():
        arguments = [f"{key}: {argument.annotation}" for key, argument in inspect.signature(spec).parameters.items()]
        line = f"    def {name}(self, *, {', '.join(arguments)}) -> {result(name, spec)}: ..."
        if len(line) > WIDTH:
            inner = "".join(f"        {argument},\n" for argument in ("self", "*", *arguments))
            line = f"    def {name}(\n{inner}    ) -> {result(name, spec)}: ..."
        methods.append(line)
    body = "\n".join(methods)
    return HEAD + "\n".join(imports(set(re.findall(r"\w+", body)))) + "\n" + CLASS + "\n" + body + "\n"


def imports(used: set[str]) -> Iterator[str]:
    """The imports of hookspecs.py that the stub needs, grouped as ruff sorts them."""
    groups: list[list[str]] = [[], [], []]
    for node in ast.walk(ast.parse(inspect.getsource(hookspecs))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and (names := sorted({alias.name for alias in node.names} & used))
        ):
            package = node.module.partition(".")[0]
            group = 0 if package in sys.stdlib_module_names else 2 if package == "fastloop" else 1
            groups[group].append(f"from {node.module} import {', '.join(names)}")
    for lines in filter(None, groups):
        yield "\n" + "\n".join(sorted(lines))
