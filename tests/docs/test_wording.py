"""The check of wording finds the words that CONTRIBUTING.md drops, and accepts the sentences that it recommends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKER = [sys.executable, str(ROOT / ".ci" / "check_wording.py")]
PAIRS = re.findall(
    r"(?m)^\| (.+) \| (.+) \|$",
    (ROOT / "CONTRIBUTING.md").read_text().partition("## English")[2].partition("|---|---|\n")[2],
)


def check(file: Path, text: str) -> list[str]:
    file.write_text(text)
    done = subprocess.run([*CHECKER, str(file)], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert (done.returncode, bool(lines)) in ((0, False), (1, True)), done.stderr
    return [line.partition(f"{file}:")[2] for line in lines[:-1]]


def test_recommended_sentences_pass(tmp_path):
    assert PAIRS
    assert check(tmp_path / "page.md", "\n\n".join(after for _, after in PAIRS)) == []


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("If a save fails, the run goes on.", "'goes on'"),
        ("The error is said.", "'is said'"),
        ("Every process must come by.", "'come by'"),
        ("What a plugin does is in its page.", "a sentence begins with 'What a plugin'"),
        ("**Why.** Of the two, one is kept.", "a sentence begins with 'Of the two,'"),
        ("That every arm trained is checked.", "a sentence begins with 'That every arm'"),
        ("A step of it takes a second.", "a sentence begins with 'A step of'"),
        ("The scripts, which say how they work, are here.", "'which say'"),
        ("The files are left alone.", "'are left alone'"),
        ("It " + "is very " * 20 + "long.", "a sentence of 42 words"),
    ],
)
def test_dropped_words_are_found_with_their_line(sentence, found, tmp_path):
    problems = check(tmp_path / "page.md", f"# Title\n\nA short sentence.\n\n{sentence}\n")
    assert len(problems) == 1
    assert problems[0].startswith(f"5: {found}")


def test_questions_code_and_tables_pass(tmp_path):
    assert (
        check(tmp_path / "page.md", "What is it? See `run goes on`.\n\n    the run goes on\n\n| what | told |\n") == []
    )


def test_docstrings_and_comments_are_checked_without_a_limit_of_length(tmp_path):
    code = f'"""It {"is very " * 20}long."""\n\nX = "goes on"  # the run goes on\n'
    assert [line.split(":")[0] for line in check(tmp_path / "module.py", code)] == ["3"]


def test_parts_made_from_docstrings_have_no_limit_of_length(tmp_path):
    long = "It " + "is very " * 20 + "long."
    page = f"A page.\n\n<!-- made: api -->\n\n{long}\n\nThe run goes on.\n\n<!-- end: api -->\n"
    assert [line.split(": ")[:2] for line in check(tmp_path / "page.md", page)] == [["7", "'goes on'"]]
