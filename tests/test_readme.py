"""README.md is correct: its recipe, its links, and the recipes that it runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import forked
import pytest
import yaml

from fastloop.recipe import shipped_recipes
from fastloop.testing import TEXTS

README = Path(__file__).parent.parent / "README.md"


def shown(language: str) -> str:
    """The text of the README's only block in a language."""
    (text,) = re.findall(rf'(?ms)^```{language}(?: title="[^"]+")?\n(.*?)^```$', README.read_text())
    return text


def with_other_numbers(line: str) -> re.Pattern[str]:
    """A pattern for lines that differ from a shown one by their numbers, and by any text in place of ``...``."""
    parts = re.split(r"(\.\.\.|[0-9.]*[0-9])", line)  # "step 226, ..." is "step ", "226", ", ", "...", ""
    patterns = []
    for index, part in enumerate(parts):
        if index % 2 == 0:
            patterns.append(re.escape(part))
        elif part == "...":
            patterns.append(".*")
        else:
            patterns.append("[0-9.]+")
    return re.compile("".join(patterns))


def test_readme_opens_with_a_job_a_plugin_and_two_commands():
    text = README.read_text()
    recipe, plugin, commands = (text.index(part) for part in ("```yaml", "```python", "make quickstart"))
    assert recipe < plugin < commands < text.index("![")
    assert len(shown("python").splitlines()) <= 13
    assert len(shown("yaml").splitlines()) <= 6


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A folder with the file of the first recipe, and a small model in place of the one from the hub."""
    folder = tmp_path_factory.mktemp("readme")
    model = {"config": TEXTS["model"]["config"], "tokenizer": TEXTS["model"]["tokenizer"]}
    rows = [("a stirring and funny film", "positive"), ("dull from start to end", "negative")] * 20
    lines = [f"{text} {index},{label}" for index, (text, label) in enumerate(rows)]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *lines]))
    recipe = yaml.safe_load(shown("yaml"))
    recipe["model"] = model
    recipe["data"]["max_length"] = 32
    (folder / "reviews.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "centered_gradients.py").write_text(shown("python"))
    return folder


@pytest.mark.slow
def test_the_job_of_the_readme_prints_lines_as_shown(reviews):
    done = forked.run("-m", "fastloop", "train", "reviews.yaml", cwd=reviews, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    printed = (done.stdout + done.stderr).splitlines()
    command, *lines = shown("console").splitlines()
    assert command == "$ fastloop train reviews.yaml"
    for line in lines:
        if line.startswith("plugins "):  # auto selects others for a small model
            line = "plugins  ..."
        pattern = with_other_numbers(line)
        assert any(pattern.fullmatch(other.rstrip()) for other in printed), line
    predicted = forked.run("-m", "fastloop", "predict", "runs/reviews", "a stirring film", cwd=reviews)
    assert json.loads(predicted.stdout)["label"] in ("positive", "negative")


@pytest.mark.slow
def test_the_plugin_of_the_readme_trains(reviews):
    added = ["--with", "./centered_gradients.py", "output=runs/centered"]
    done = forked.run("-m", "fastloop", "train", "reviews.yaml", *added, cwd=reviews)
    assert done.returncode == 0, done.stderr
    summary = json.loads((reviews / "runs" / "centered" / "summary.json").read_text())
    assert "centered-gradients" in str(summary["plugins"])


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README.read_text()))))
def test_readme_links_exist(link):
    assert (README.parent / link).exists()


def test_readme_recipes_are_shipped():
    for name in re.findall(r"fastloop train (?:recipes/)?([a-z]\w+)", README.read_text()):
        assert name in shipped_recipes() or name == "reviews"
