"""README.md is correct: its recipe, its links, and the recipes that it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fastloop.recipe import make_recipe, shipped_recipes

README = Path(__file__).parent.parent / "README.md"


def test_readme_recipe_is_valid():
    block = re.search(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    recipe = make_recipe(yaml.safe_load(block.group(1)))
    assert recipe.train.batch_size == 12
    assert list(recipe.plugins) == ["auto", "checkpoint-best"]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README.read_text()))))
def test_readme_links_exist(link):
    assert (README.parent / link).exists()


def test_readme_recipes_are_shipped():
    for name in re.findall(r"fastloop train (?:recipes/)?([a-z]\w+)", README.read_text()):
        assert name in shipped_recipes()
