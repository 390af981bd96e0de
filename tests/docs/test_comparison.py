"""docs/comparison.md: all names of fastloop exist, and each row of fastloop names a test."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fastloop.plugins.installed import installed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
PEERS = ["HF Trainer", "Lightning", "Axolotl"]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
HEADS = [row for row in ROWS if row[1] == "fastloop"]
ROWS = [row for row in ROWS if row[1:2] not in (["fastloop"], ["---"])]
"""The cells of every row: the subject, fastloop, the three others, and the test of ours."""


def test_every_table_has_the_same_columns():
    assert len(HEADS) > 5
    assert all(row[1:] == ["fastloop", *PEERS, "test"] for row in HEADS)
    assert len(ROWS) > 40
    assert [row for row in ROWS if len(row) != 6] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_our_cell_has_a_link_and_a_test_that_exists(row):
    if row[1] in ("no", "own code", "in development"):
        assert row[5] == "-"
        return
    assert re.search(r"\]\([\w/.-]+\.md(#[\w-]+)?\)", row[1]), "our cell links to a page of these docs"
    named = re.findall(r"`((?:packages/[\w-]+/)?tests/[\w/.-]+)`", row[5])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_cell_of_another_library_has_a_link_or_a_known_word(row):
    for cell in row[2:5]:
        assert re.search(r"\]\[[\w-]+\]", cell) or cell in ("own code", "no", "not found"), cell


def test_every_reference_is_defined_and_used():
    used = set(re.findall(r"\]\[([\w-]+)\]", PAGE))
    defined = re.findall(r"(?m)^\[([\w-]+)\]: https://\S+$", PAGE)
    assert len(defined) == len(set(defined))
    assert used == set(defined)


def test_plugins_and_commands_of_our_column_are_registered(monkeypatch):
    ours = " ".join(row[1] for row in ROWS)
    plugins = re.findall(r"\[`([\w-]+)`\]\((?:plugins|tasks)/", ours)
    assert len(plugins) > 12
    assert set(plugins) <= set(installed())
    monkeypatch.syspath_prepend(ROOT / "docs")
    commands = {name for name, _ in import_module("_sources").leaves()}
    sys.modules.pop("_sources")
    named = [" ".join(words) for words in re.findall(r"`(fastloop) (new plugin|[\w-]+)", ours)]
    assert len(named) > 8
    assert set(named) <= commands
