"""The tables of what is checked before training name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "checks").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_table_names_exists(page):
    named = set(re.findall(r"(test_\w+\.py)::(test_\w+)", page.read_text(encoding="utf-8")))
    assert named
    for file, name in sorted(named):
        paths = [*(ROOT / "tests").rglob(file)]
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in paths), f"{file}::{name}"
