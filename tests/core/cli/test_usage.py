"""Errors in a command line have a code, a place and a remedy, as text and as JSON, and exit with 2.

Modules:
    core/fastloop/cli/usage.py
"""

from __future__ import annotations

import json

import pytest

from fastloop.testing import assert_problem

CASES = {
    "unknown-command train": ["trian"],
    "missing-value train RECIPE": ["train"],
    "unknown-option plan --wiht --with": ["plan", "quickstart", "--wiht", "a"],
    "unknown-option fastloop --jsom --json": ["--jsom", "plan", "quickstart"],
    "unknown-option new --taks": ["new", "--taks"],
    "invalid-value train --nproc": ["train", "quickstart", "--nproc", "two"],
    "invalid-usage train --with": ["train", "quickstart", "--with"],
    "invalid-usage plugins b": ["plugins", "a", "b"],
}


@pytest.mark.parametrize("expected", CASES)
def test_an_error_in_the_command_line_has_a_code(cli, expected):
    code, out, err = cli(*CASES[expected])
    assert (code, out) == (2, "")
    assert_problem(err, expected)


@pytest.mark.parametrize("expected", CASES)
def test_an_error_in_the_command_line_is_json_with_the_option_json(cli, expected):
    code, out, err = cli("--json", *CASES[expected])
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    fields = json.loads(line)
    code_of_error, *words = expected.split()
    assert (fields["level"], fields["code"]) == ("error", code_of_error)
    assert all(word in fields["message"] for word in words)
    assert any(proposal.endswith("--help") for proposal in fields["proposals"])


def test_json_without_a_command_is_an_error_with_a_code(cli):
    code, _, err = cli("--json")
    assert code == 2
    assert json.loads(err)["code"] == "invalid-usage"


def test_no_arguments_show_the_help(cli):
    code, out, err = cli()
    assert code in (0, 2)  # depends on the release of click
    assert "--version" in out + err
