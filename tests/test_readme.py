"""README.md is correct: its recipe, its links, and the recipes that it runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import forked
import pytest
import yaml

from fastloop.recipe import shipped_recipes

README = Path(__file__).parent.parent / "README.md"


def shown(language: str) -> str:
    """The text of the README's only block in a language."""
    (text,) = re.findall(rf'(?ms)^```{language}(?: title="[^"]+")?\n(.*?)^```$', README.read_text())
    return text


def test_readme_opens_with_a_plugin_its_recipe_and_two_commands():
    plugin, recipe, commands = (README.read_text().index(text) for text in ("```python", "```yaml", "make quickstart"))
    assert plugin < recipe < commands < README.read_text().index("![")
    assert len(shown("python").splitlines()) <= 13
    assert yaml.safe_load(shown("yaml"))["plugins"] == ["./centered_gradients.py"]


@pytest.mark.slow
def test_readme_plugin_trains_and_the_shown_plugins_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("centered_gradients.py").write_text(shown("python"))
    Path("recipe.yaml").write_text(shown("yaml"))
    small = ["train.epochs=1", "data.arguments={train: 64, validation: 16, test: 16}"]
    done = forked.run("-m", "fastloop", "train", "recipe.yaml", *small, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    lines = shown("console").splitlines()
    assert lines[0] == "$ .venv/bin/fastloop train recipe.yaml"
    assert {line for line in lines if line.startswith(("plugins ", "run folder "))} <= {*printed}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README.read_text()))))
def test_readme_links_exist(link):
    assert (README.parent / link).exists()


def test_readme_recipes_are_shipped():
    for name in re.findall(r"fastloop train (?:recipes/)?([a-z]\w+)", README.read_text()):
        assert name in shipped_recipes() or name == "recipe"
