"""Each mutant fits the code of today, and the tool finds the tests that notice it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from _mutant_table import MUTANTS, Mutant  # noqa: E402
from mutants import insert_reach, judge  # noqa: E402

CODE = """\
def sign(x: int) -> int:
    if x < 0:
        return -1
    elif x > 0:
        return (
            1
        )
    return 0
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    code = (ROOT / mutant.path).read_text()
    changed = mutant.apply(code)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))
    ast.parse(insert_reach(code, [(0, mutant)]))


def test_mutants_use_no_undefined_name(tmp_path: Path) -> None:
    """Such a mutant raises a NameError, and every test that reaches it notices that instead of its meaning."""
    for number, mutant in enumerate(MUTANTS):
        code = (ROOT / mutant.path).read_text()
        (tmp_path / f"mutant_{number}.py").write_text(mutant.apply(code))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "F821", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout


def test_names_of_mutants_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_a_place_that_is_missing_or_repeated_is_an_error() -> None:
    with pytest.raises(ValueError, match="found 0 times"):
        Mutant("gone", "sign.py", "x == 0", "x").apply(CODE)
    with pytest.raises(ValueError, match="found 3 times"):
        Mutant("several", "sign.py", "return", "yield").apply(CODE)


@pytest.mark.parametrize(
    ("before", "statement"), [("return -1", "return -1"), ("x > 0", "if x < 0:"), ("1\n        )", "return (")]
)
def test_a_call_precedes_the_statement_that_a_mutant_changes(before: str, statement: str) -> None:
    lines = insert_reach(CODE, [(3, Mutant("one", "sign.py", before, "pass"))]).splitlines()
    call = next(index for index, line in enumerate(lines) if "note(3)" in line)
    assert lines[call + 1].strip() == statement


def test_failures_without_a_mutant_are_not_counted() -> None:
    mutant = Mutant("one", "sign.py", "x", "y")
    outcome = judge(mutant, {"a.py::t": False, "b.py::t": False, "b.py::u": True}, {"a.py::t"})
    assert (outcome.reached, outcome.noticed, outcome.files) == (2, 1, 1)
    assert judge(mutant, None, set()).timed_out


@pytest.mark.slow
def test_a_mutant_is_noticed_by_the_test_of_its_meaning() -> None:
    """In a copy of the tree, with the cases of one test."""
    test = "tests/plugins/rows/test_formats.py::test_a_bad_element_of_a_json_list_is_named_after_the_rows_before_it"
    command = [sys.executable, "benchmarks/mutants.py", "--only", "a repeated key of json is ignored"]
    done = subprocess.run(
        [*command, "--tests", test],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 fail without a mutant" in done.stdout
    assert "noticed by 1 of" in done.stdout
