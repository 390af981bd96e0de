"""Comparisons of errors and warnings by their fields, so that tests do not depend on the words of a message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastloop.errors import FastloopError
from fastloop.problem import Problem

SHOWN = re.compile(r"^(?:error|warning): (.*?)\s\[([a-z][a-z0-9-]*)\]$", re.MULTILINE | re.DOTALL)
"""A problem in the output of a command."""


@contextmanager
def expect_problem(
    expected: str, kind: type[FastloopError] = FastloopError
) -> Iterator[pytest.ExceptionInfo[FastloopError]]:
    """``pytest.raises`` for an error of fastloop with given fields::

        with expect_problem("unknown-option plugins.ema.decya decay", RecipeError):
            ...

    Args:
        expected: The code, then names, keys and numbers that the message must contain, separated by spaces.
        kind: The class of the error.
    """
    with pytest.raises(kind) as raised:
        yield raised
    assert_problem(raised.value.problem, expected)


def assert_problem(shown: Problem | str | pytest.LogCaptureFixture, expected: str) -> None:
    """Check that a problem has a code, and names, keys and numbers in its message.

    Args:
        shown: A problem, the output of a command, or the fixture ``caplog``. In the last two, any problem may match.
        expected: As in ``expect_problem``.

    Raises:
        AssertionError: There is no such problem. It shows the problems that were found.
    """
    if find_problems(shown, expected):
        return
    problems = _problems_in(shown)
    listed = "\n".join(f"  {problem} [{problem.code}]" for problem in problems) or f"  none in {shown!r}"
    raise AssertionError(f"expected the problem {expected!r}, and found:\n{listed}")


def find_problems(shown: Problem | str | pytest.LogCaptureFixture, expected: str) -> list[Problem]:
    """The problems with a code, and with names, keys and numbers in their message; empty: there are none.

    The arguments are those of ``assert_problem``.
    """
    code, *words = expected.split()
    problems = []
    for problem in _problems_in(shown):
        if problem.code == code and all(word in str(problem) for word in words):
            problems.append(problem)
    return problems


def _problems_in(shown: Problem | str | pytest.LogCaptureFixture) -> list[Problem]:
    """The problems of ``assert_problem``. Those of an output have their whole message as text."""
    if isinstance(shown, Problem):
        return [shown]
    if isinstance(shown, str):
        return [Problem(text, code=code) for text, code in SHOWN.findall(shown)]
    return [record.msg for record in shown.records if isinstance(record.msg, Problem)]
