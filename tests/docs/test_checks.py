"""The tables of checks before training name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "checks").glob("*.md"))
FILES = [*(ROOT / "tests").rglob("test_*.py"), ROOT / "core/fastloop/testing/conformance.py"]
TESTS = {path: path.read_text(encoding="utf-8") for path in FILES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_table_names_exists(page):
    named = set(re.findall(r"(?:(test_\w+\.py)::)?\b(test_\w+)\b(?!\.py)", page.read_text(encoding="utf-8")))
    assert named
    for file, name in sorted(named):
        found = [text for path, text in TESTS.items() if not file or path.name == file]
        assert any(f"def {name}(" in text for text in found), f"{file}::{name}"
