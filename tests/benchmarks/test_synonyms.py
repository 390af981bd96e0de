"""Synonyms replace the words of messages, and neither names nor other strings."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from synonyms import SYNONYMS, rephrase, report  # noqa: E402

CODE = '''\
def check(found, folder):
    """The folder is missing."""
    known = {"missing": "folder", "found": 3}
    if found["missing"] == "the folder is missing":
        log.info("%s: the folder is empty", folder)
        raise RecipeError(
            f"found {found['missing']}, expected 'a folder' or `found --only x`."
            " Only data.folder=missing.", code="missing-folder", place="folder: found"
        )
    return f"the folder {folder} is missing."
'''
REPHRASED = '''\
def check(found, folder):
    """The folder is missing."""
    known = {"missing": "folder", "found": 3}
    if found["missing"] == "the folder is missing":
        log.info("%s: the directory is blank", folder)
        raise RecipeError(
            f"saw {found['missing']}, wanted 'a folder' or `found --only x`."
            " Just data.folder=missing.", code="missing-folder", place="folder: found"
        )
    return f"the directory {folder} is absent."
'''


def test_words_of_messages_are_replaced():
    assert rephrase(CODE) == REPHRASED


def test_a_word_has_another_one():
    assert len(SYNONYMS) > 40
    assert all(word != other for word, other in SYNONYMS.items())


def test_tests_of_wording_are_listed_apart():
    ran = ["tests/core/test_a.py::t", "tests/core/test_b.py::t", "tests/docs/test_pages.py::t"]
    assert report(ran, ran[1:]).splitlines() == [
        "  tests/core/test_b.py::t",
        "   1 tests/core",
        "about wording: tests/docs/test_pages.py::t",
        "1 of 2 tests break: 50.0%",
    ]
