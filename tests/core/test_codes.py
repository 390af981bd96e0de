"""Every error and warning of the sources has a code, and docs/errors.md shows each code."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastloop import Problem, errors

ROOT = Path(__file__).parents[2]
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
LOGS = {"log", "logger", "self.log"}
Calls = list[tuple[str, ast.Call]]


@pytest.fixture(scope="module")
def parsed() -> Iterator[tuple[Calls, list[Problem]]]:
    """The calls in the sources, each with its file; and the errors and warnings that they make. Values that are known
    in a run are names in braces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        import _codes

        calls = _codes.calls()
        made = [_codes.problem_of(call) for _, call in calls]
        yield calls, [problem for problem in made if problem is not None]
        del sys.modules["_codes"]


@pytest.fixture
def calls(parsed: tuple[Calls, list[Problem]]) -> Calls:
    return parsed[0]


@pytest.fixture
def problems(parsed: tuple[Calls, list[Problem]]) -> list[Problem]:
    return parsed[1]


def called_name(call: ast.Call) -> str:
    """The last part of the name of what is called: ``RecipeError`` for ``errors.RecipeError(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


@pytest.fixture
def codes(problems: list[Problem]) -> list[str]:
    return [problem.code for problem in problems]


def test_every_error_has_a_code(calls):
    without = []
    for file, call in calls:
        if called_name(call) in KINDS and all(word.arg not in ("code", None) for word in call.keywords):
            without.append(f"{file}:{call.lineno}")
    assert without == [], "give these a code: docs/write-a-plugin.md, Errors and warnings"


def test_every_warning_has_a_code(calls):
    without = []
    for file, call in calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("warning", "error", "log"):
            continue
        if ast.unparse(call.func.value) not in LOGS:
            continue
        is_text = isinstance(call.args[0], ast.Constant | ast.JoinedStr)
        if is_text or len(call.args) > 1:
            without.append(f"{file}:{call.lineno}")
    assert without == [], "log a Problem: docs/write-a-plugin.md, Errors and warnings"


def test_codes_are_lower_case_with_hyphens(codes):
    assert len(codes) > 800
    assert [code for code in codes if not re.fullmatch(r"[a-z]+(-[a-z]+)*", code)] == []


def test_the_page_shows_every_code(codes):
    shown = re.findall(r"(?m)^- `([a-z-]+)`(?:, in .+)?$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    classes = [kind for name, kind in vars(errors).items() if name in KINDS]
    of_classes = {kind.code for kind in classes}
    assert {"run-failed", "invalid-recipe"} < of_classes
    assert shown == sorted({*codes, *of_classes})


def test_sentences_end_once(problems):
    """A text has a full stop before another field, and no message has two of them."""
    wrong = []
    for problem in problems:
        followed = problem.found or problem.expected or problem.remedy or problem.command
        if followed and problem.text.strip() and problem.text.strip()[-1] not in ".?!}:":
            wrong.append(problem)
        has_two_stops = re.search(r"(?<!\.)\.\.(?![./\w])", str(problem)) is not None
        if has_two_stops or problem.found.endswith(".") or problem.expected.endswith("."):
            wrong.append(problem)
    assert wrong == []
