"""Messages with the error of another library: one line of it, and one full stop."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
import torch

from fastloop import errors
from fastloop.problem import clause, typed_clause

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "core", ROOT / "plugins", *(ROOT / "packages").glob("*/src")]
MESSAGES = {"Problem", *(name for name in (*vars(errors), *vars(builtins)) if name.endswith("Error")), "PluginCrash"}
"""The calls whose first argument may end with the whole text of an error: nothing follows it."""
NO_MESSAGE = {
    "core/fastloop/problem.py",  # ``clause`` itself
    "core/fastloop/cli/messages.py",  # the name of a signal
    "core/fastloop/testing/runs.py",  # the record of a failed run
    "plugins/fastloop_plugins/memory/_out_of_memory.py",  # a file about a failure
}
"""Files with the whole text of an error in a text that is no message."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such device."), "no such device"),
        (ValueError("no such device..."), "no such device"),
        (ValueError("first line.\nsecond line"), "first line"),
        (ValueError("\n  first line \n"), "first line"),
        (ValueError("header:\n\tthe keys.\n"), "header: the keys"),
        (ValueError("header:"), "header"),
        (ValueError(), "ValueError"),
        (ValueError("..."), "ValueError"),
        (
            errors.RecipeError("is wrong.", code="x", place="r.yaml: k", remedy="Remove it."),
            "r.yaml: k: is wrong. Remove it",
        ),
    ],
)
def test_a_clause_is_one_line_without_a_full_stop(error: Exception, expected: str):
    assert clause(error) == expected
    assert typed_clause(error) == (expected if expected == "ValueError" else f"{type(error).__name__}: {expected}")


def test_a_clause_of_torch_has_the_keys():
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(1, 1).load_state_dict({})
    assert '"weight", "bias"' in clause(raised.value)


def test_no_message_has_the_lines_and_the_full_stop_of_an_error_inside():
    """An error's text inside of a message is a clause: two full stops and a break in a sentence are impossible."""
    whole = {}
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = list(_whole_errors(tree))
            if texts:
                whole[path.relative_to(ROOT).as_posix()] = texts
    unexpected = {file: texts for file, texts in whole.items() if file not in NO_MESSAGE}
    assert unexpected == {}, "use clause(error) or typed_clause(error) of fastloop.problem"


@pytest.mark.parametrize(
    "code",
    [
        "raise RecipeError(f'cannot be read: {error}.')",
        "raise RecipeError(f'{error}: no file')",
        "raise RecipeError(f'cannot be read: {error}', remedy='Copy it.')",
        "problem = f'cannot be read: {error}'",
        "problem = f'cannot be read: {str(error)[:200]}'",
        "problem = str(error).splitlines()[0]",
        "problem = str(error).rstrip('.')",
    ],
)
def test_the_search_finds_whole_errors(code: str):
    assert len(list(_whole_errors(ast.parse(f"try:\n    f()\nexcept OSError as error:\n    {code}\n")))) == 1


def _whole_errors(tree: ast.Module) -> Iterator[str]:
    """The expressions with the text of an error that should be clauses."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and _is_error(node.value, parents):
            text = parents[node]
            if not (text.values[-1] is node and _ends_message(text, parents)):
                yield ast.unparse(text)
        if _is_str(node) and _is_error(node, parents):
            cut = ast.unparse(parents[parents[node]]) if isinstance(parents[node], ast.Attribute) else ""
            if cut.startswith(
                tuple(f"{ast.unparse(node)}.{name}(" for name in ("splitlines", "rstrip", "removesuffix"))
            ):
                yield cut


def _is_str(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether an expression is a call of ``str``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"


def _is_error(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether an expression is an error that an ``except`` or an argument names, or its text, also cut."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if _is_str(node) and node.args:
        node = node.args[0]
    return isinstance(node, ast.Name) and node.id in _errors_around(node, parents)


def _errors_around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> set[str]:
    """The names of errors where a node is."""
    names = set()
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        if isinstance(node, ast.FunctionDef):
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                kinds = ast.unparse(argument.annotation) if argument.annotation else ""
                if any(kind.strip().endswith(("Error", "Exception")) for kind in kinds.split("|")):
                    names.add(argument.arg)
    return names


def _ends_message(text: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a text ends a message: it is the first argument of an error, and no other field follows it."""
    call = parents[text]
    if not isinstance(call, ast.Call) or call.args[:1] != [text]:
        return False
    follows = {"found", "expected", "remedy", "command"} & {word.arg for word in call.keywords}
    return ast.unparse(call.func).rpartition(".")[2] in MESSAGES and not follows
