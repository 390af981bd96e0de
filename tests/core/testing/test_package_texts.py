"""Texts of a package that still describe the example of `fastloop new`.

Modules:
    core/fastloop/testing/package_texts.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from fastloop.plugins.plugin import Plugin
from fastloop.testing.package_texts import find_package, leftovers
from fastloop_tools.new.command import render

OWN = '''"""Warms the run.

    plugins:
      - night-watch: {degrees: 30}
"""

from fastloop import Plugin, option


class NightWatch(Plugin):
    """Warms the run up to a temperature."""

    name = "night-watch"
    numerics = "changes-training"
    degrees: float = option("How warm.", default=20.0)
'''


def package(files: dict[str, str]) -> type[Plugin]:
    """Write the files of a package, and import its class."""
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    spec = importlib.util.spec_from_file_location("night_watch", "src/night_watch/__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["night_watch"] = module
    spec.loader.exec_module(module)
    cls: type[Plugin] = module.NightWatch
    return cls


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    monkeypatch.delitem(sys.modules, "night_watch", raising=False)
    yield
    sys.modules.pop("night_watch", None)


@pytest.mark.parametrize("task", [False, True], ids=["plugin", "task"])
def test_a_new_package_describes_its_example(task):
    assert leftovers(package(render("night-watch", task=task))) == []


def test_every_leftover_is_listed_with_its_place():
    cls = package(render("night-watch") | {"src/night_watch/__init__.py": OWN})
    found = leftovers(cls)
    lines = Path("README.md").read_text().splitlines()
    recipe = next(number for number, line in enumerate(lines, start=1) if "{every: 10}" in line)
    places = [problem.partition(": ")[0] for problem in found]
    assert places.count("pyproject.toml") == 1
    assert places.count("README.md") == 1, "the row of the table of options"
    assert f"README.md, line {recipe}" in places
    assert any(problem.startswith("recipe.yaml, line") and "'every'" in problem for problem in found)
    text = "\n".join(found)
    assert "records the lowest training loss" in text
    assert "'bitwise'" in text
    assert "write_summary" in text


def test_texts_of_the_own_plugin_are_no_leftovers():
    files = render("night-watch") | {"src/night_watch/__init__.py": OWN}
    files["recipe.yaml"] = "plugins:\n  - night-watch: {degrees: 5}\n"
    files["README.md"] = (
        "# night-watch\n\nA fastloop plugin that warms the run up to a temperature.\n\n"
        "    - night-watch: {degrees: 30}\n\nNumerics class `changes-training`.\n\n"
        "| option | default |\n|---|---|\n| `degrees` | 20.0 |\n\n| file | |\n|---|---|\n| `every` | no option |\n"
    )
    files["pyproject.toml"] = files["pyproject.toml"].replace(
        "records the lowest training loss of a run, and its step", "warms the run up to a temperature"
    )
    assert leftovers(package(files)) == []


def test_a_package_that_registers_another_plugin_is_not_read():
    files = render("night-watch") | {"src/night_watch/__init__.py": OWN}
    files["pyproject.toml"] = files["pyproject.toml"].replace("night-watch = ", "day-watch = ")
    cls = package(files)
    assert find_package(cls) is None
    assert leftovers(cls) == []
