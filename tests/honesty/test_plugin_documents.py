"""The conformance suite finds a README, a description or a docstring that is about another plugin."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastloop.plugins.installed import load
from fastloop.testing import Conformance
from fastloop.testing.documents import Documents, option_rows, problems
from fastloop_tools.new.command import render

ROOT = Path(__file__).parents[2]
DOUBLES = '''"""Doubles every gradient.

    plugins:
      - night-watch: {factor: 2.0}
"""

from dataclasses import dataclass
from typing import Annotated

from fastloop import Plugin, hookimpl, option


class NightWatch(Plugin):
    """Gradients times a factor."""

    name = "night-watch"
    numerics = "changes-training"
    description = "multiplies gradients"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        factor: Annotated[float, option("What gradients are multiplied by.", gt=0)] = 2.0

    @hookimpl
    def after_backward(self, run):
        for parameter in run.model.parameters():
            parameter.grad.mul_(self.config.factor)
'''
README = """# night-watch

Multiplies gradients (numerics class `changes-training`).

| option | type | default | what it does |
|---|---|---|---|
| `factor` | float | 2.0 | What gradients are multiplied by. |
"""

TEMPLATE = "A fastloop plugin that records the lowest training loss of a run, and its step"
"""The description in the template's pyproject.toml."""

Project = Callable[..., None]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Write a package as ``fastloop new plugin night-watch`` does, with some files replaced, and install it, as pip or
    as pip -e does."""
    site, home = tmp_path / "site", tmp_path / "night-watch"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def write(editable: bool = False, description: str = "", **changed: str) -> None:
        files = render("night-watch") | {
            {"readme": "README.md", "code": "src/night_watch/__init__.py"}[key]: text for key, text in changed.items()
        }
        if description:
            files["pyproject.toml"] = files["pyproject.toml"].replace(TEMPLATE, description)
        for path, text in files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        shutil.copytree(home / "src", site, dirs_exist_ok=True)
        info = site / "night_watch-0.1.0.dist-info"
        info.mkdir()
        shown = "an older description\n\nan older README" if editable else f"{description or TEMPLATE}\n\n"
        body = "" if editable else files["README.md"]
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: night-watch\nVersion: 0.1.0\nSummary: {shown}{body}"
        )
        (info / "entry_points.txt").write_text("[fastloop.plugins]\nnight-watch = night_watch:NightWatch\n")
        if editable:
            (info / "direct_url.json").write_text(json.dumps({"url": home.as_uri(), "dir_info": {"editable": True}}))
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("night_watch", None)


def verdict() -> str:
    """The failure message of ``test_documented``; empty if it passes."""
    suite = type("Suite", (Conformance,), {"plugin": "night-watch"})()
    try:
        suite.test_documented()
    except pytest.fail.Exception as failed:
        return str(failed)
    return ""


def test_a_fresh_package_passes(project):
    project()
    assert verdict() == ""


def test_a_package_whose_texts_were_changed_with_its_code_passes(project):
    project(code=DOUBLES, readme=README, description="Multiplies gradients")
    assert verdict() == ""


def test_unchanged_template_description_is_reported(project):
    project(code=DOUBLES, readme=README)
    assert verdict() == (
        "plugin 'night-watch' promises to describe what it does. Found: the text of `fastloop new` in the "
        "description in pyproject.toml. Describe this plugin there."
    )


def test_unchanged_template_readme_is_reported(project):
    project(code=DOUBLES, description="Multiplies gradients")
    assert "a table of its options in the README. Found: no row for factor" in verdict()
    found = [problem.found for problem in problems(load("night-watch"), importlib.metadata.distribution("night-watch"))]
    assert found == [
        "no row for factor",
        "a row for every, which is no option",
        "another one, or none",
        "the text of `fastloop new` in README.md",
    ]


def test_unchanged_template_docstrings_are_reported(project):
    (code,) = (text for path, text in render("night-watch").items() if path.startswith("src/"))
    project(code=code.replace("value < self.lowest", "value > self.lowest"))
    assert verdict().endswith(
        "the text of `fastloop new` in the description in pyproject.toml, README.md, the docstring of "
        "night_watch, `description`, the docstring of NightWatch. Describe this plugin there."
    )


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "`changes-training`",
            "`bitwise`",
            "promises its numerics class in the README: `changes-training`. Found: another one, or none.",
        ),
        ("| 2.0 |", "| 3.0 |", "promises the default of its option 'factor' in the README: 2.0. Found: 3.0."),
        ("| `factor` |", "| `factors` |", "Found: no row for factor."),
        (
            "| `factor`",
            "| `strength` | float | 1 | How much. |\n| `factor`",
            "Found: a row for strength, which is no option.",
        ),
    ],
    ids=["numerics", "default", "renamed", "unknown"],
)
def test_readme_that_contradicts_class_is_reported(project, old, new, found):
    project(code=DOUBLES, readme=README.replace(old, new), description="Multiplies gradients")
    assert found in verdict()


def test_an_editable_install_is_judged_by_its_files(project):
    project(editable=True, code=DOUBLES, readme=README, description="Multiplies gradients")
    assert Documents.of(importlib.metadata.distribution("night-watch")) == Documents(README, "Multiplies gradients")
    assert verdict() == ""


def test_a_package_without_a_readme_passes(project):
    project(code=DOUBLES, readme="", description="Multiplies gradients")
    assert verdict() == ""


@pytest.mark.parametrize("home", sorted(ROOT.glob("examples/*/README.md")), ids=lambda home: home.parent.name)
def test_the_examples_show_their_options(home):
    rows = option_rows(home.read_text(encoding="utf-8"))
    assert rows
    assert all(row.keys() == {"option", "type", "default", "what it does"} for row in rows.values())


def test_cells_may_hold_bars_and_other_tables_are_not_options():
    text = "| option | default |\n|:--|--:|\n| `a` | `x \\| y` |\n\n| key | what |\n|---|---|\n| `b` | c |\n"
    assert option_rows(text) == {"a": {"option": "a", "default": "x \\| y"}}
