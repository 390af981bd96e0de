"""The page of an error is reachable from its message: a terminal shows it, and logs do not.

Modules:
    core/fastloop/cli/messages.py
"""

from __future__ import annotations

import importlib.metadata
import os
import pty
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from fastloop.cli.messages import PAGES, documentation

DOCS = Path(__file__).parents[3] / "docs"
SHOWN = [
    (page.relative_to(DOCS).as_posix(), message)
    for page in sorted(DOCS.rglob("*.md"))
    for message in re.findall(r"(?m)^error: (.+)$", page.read_text(encoding="utf-8"))
]


def test_every_page_exists_and_every_page_of_checks_is_one():
    assert all((DOCS / page).is_file() for page in PAGES.values())
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.glob("checks/*.md")} <= set(PAGES.values())


@pytest.mark.parametrize(
    ("message", "page"),
    [
        ("reviews.csv: there is no column 'text', which data.text names.", "checks/data.md"),
        (
            "train.csv: line 3 has 4 cells. Give data.read.quoting=none, or add the plugin skip-unreadable.",
            "checks/data.md",
        ),
        ("recipe.yaml: train.batch_size: 32 is not a multiple of 7", "recipe.md"),
        ("recipe.yaml: plugins.ema.decay: found 2", "checks/plugins.md"),
        ("plugin 'liger' needs a device of type cuda", "checks/plugins.md"),
        ("recipe: model: XLMWithLMHeadModel is not causal", "checks/tasks.md"),
        ("the optimizer lost 3 parameters", "checks/parameters.md"),
        ("Trainer(batch_sampler=...): keep its order", "checks/python.md"),
        ("runs/a: no such folder", None),
    ],
)
def test_the_first_subject_of_a_message_decides(message, page):
    assert documentation(message) == (page and f"docs/{page}")


def test_most_errors_that_the_pages_show_have_a_page():
    found = [documentation(message) for _, message in SHOWN]
    assert len(found) > 2
    assert sum(page is not None for page in found) > 0.8 * len(found)


def test_a_release_has_the_address_of_its_metadata(monkeypatch):
    metadata = Message()
    metadata["Project-URL"] = "Documentation, https://example.org/blob/v1/docs/index.md"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    assert documentation("data.text: found 1") == "https://example.org/blob/v1/docs/checks/data.md"


@pytest.mark.slow
def test_a_terminal_shows_the_page_and_a_log_does_not(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {name: x}\ndata: {files: {train: none.csv}, text: a, label: b}\n")
    command = [sys.executable, "-m", "fastloop", "plan", "recipe.yaml", "train.lr=fast"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    log = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert log.returncode == 2
    assert "docs:" not in log.stderr
    reader, terminal = pty.openpty()
    subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=terminal, check=False, timeout=600
    )
    os.close(terminal)
    shown = os.read(reader, 10_000).decode().splitlines()
    assert [*log.stderr.splitlines(), "docs: docs/recipe.md"] == shown
