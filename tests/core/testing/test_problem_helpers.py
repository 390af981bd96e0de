"""``expect_problem`` and ``assert_problem``: codes, names and numbers are compared.

Modules:
    core/fastloop/testing/problems.py
"""

from __future__ import annotations

import logging

import pytest

from fastloop import PluginError, Problem, RecipeError
from fastloop.cli.messages import print_error
from fastloop.testing import assert_problem, expect_problem

ERROR = RecipeError("found 3.", code="out-of-range", place="r.yaml: train.lr")


@pytest.mark.parametrize("expected", ["out-of-range", "out-of-range train.lr 3", "out-of-range 3 r.yaml:"])
def test_fields_that_fit(expected: str):
    with expect_problem(expected, RecipeError) as raised:
        raise ERROR
    assert raised.value is ERROR
    assert_problem(f"starting\nerror: {ERROR} [out-of-range]\n", expected)


@pytest.mark.parametrize("expected", ["range", "unknown-option train.lr", "out-of-range train.lr 4"])
def test_fields_that_do_not_fit(expected: str):
    with pytest.raises(AssertionError, match=r"train\.lr"), expect_problem(expected):
        raise ERROR
    with pytest.raises(AssertionError):
        assert_problem(f"error: {ERROR} [out-of-range]", expected)


def test_another_class_does_not_fit():
    with pytest.raises(RecipeError), expect_problem("out-of-range", PluginError):
        raise ERROR


def test_warnings(caplog: pytest.LogCaptureFixture):
    logging.getLogger("fastloop").warning(Problem("is idle.", code="no-effect", place="ema"))
    assert_problem(caplog, "no-effect ema")
    assert_problem("12 steps\nwarning: ema: is idle. [no-effect]\ndone\n", "no-effect ema")
    with pytest.raises(AssertionError):
        assert_problem(caplog, "no-effect lion")


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        (Problem("a is missing.", code="no-file"), "error: a is missing. [no-file]\n"),
        (Problem("not today", code="no-file"), "error: not today [no-file]\n"),
        (
            Problem(remedy="Continue it with:", command="fastloop sweep a --resume", code="no-file"),
            "error: Continue it with: fastloop sweep a --resume\n[no-file]\n",
        ),
        (
            Problem("a is missing.", remedy="Install it:", command="pip install a", code="no-file"),
            "error: a is missing. Install it: pip install a\n[no-file]\n",
        ),
    ],
)
def test_a_code_does_not_follow_a_command_that_is_copied(
    problem: Problem, shown: str, capsys: pytest.CaptureFixture[str]
):
    print_error(problem)
    err = capsys.readouterr().err
    assert err == shown
    assert_problem(err, "no-file")
    assert problem.command == "" or problem.proposals == [problem.command]
