"""Texts and images name their source in the same way: one option, which may be a function.

Modules:
    plugins/fastloop_plugins/rows/source.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.errors import RecipeError
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem
from fastloop_plugins.tasks.image.data import ImageData
from fastloop_plugins.text.data import TextData

SECTIONS = {
    "texts": lambda recipe: TextData(recipe, labelled=False),
    "images": ImageData,
}
OWN = {"texts": ("files", {"train": "a.txt"}), "images": ("images", "folder")}
FUNCTIONS = """
def rows(count): return {}

def broken(): return len(5)

def needy(): import no_such_package
"""


def section(kind: str, **data: object) -> TextData | ImageData:
    return SECTIONS[kind](make_recipe({"data": data}, Path("recipe.yaml")))


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("mine.py").write_text(FUNCTIONS)
    Path("a.txt").write_text("a\n")
    Path("folder").mkdir()


@pytest.mark.parametrize("kind", SECTIONS)
def test_exactly_one_option_names_the_source(kind):
    own, value = OWN[kind]
    with expect_problem("exclusive-options recipe.yaml: data none", RecipeError):
        section(kind)
    with expect_problem(f"exclusive-options recipe.yaml: data {own} and module", RecipeError):
        section(kind, **{own: value, "module": "mine.py:rows"})


@pytest.mark.parametrize("kind", SECTIONS)
def test_arguments_are_for_a_function_that_takes_them(kind):
    own, value = OWN[kind]
    with expect_problem("unknown-option data.arguments data.module", RecipeError):
        section(kind, **{own: value, "arguments": {"count": 2}})
    data = section(kind, module="mine.py:rows", arguments={"number": 2})
    with expect_problem("call-failed data.arguments mine.py:rows 'count'", RecipeError):
        data.load()


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_file_that_does_not_exist_is_named_before_data_is_read(kind):
    with expect_problem("file-missing data.module other.py", RecipeError):
        section(kind, module="other.py:rows")


@pytest.mark.parametrize("kind", SECTIONS)
def test_an_error_inside_the_function_is_that_of_its_code(kind):
    with pytest.raises(TypeError, match="has no len"):
        section(kind, module="mine.py:broken").load()
    with expect_problem("call-failed data.module no_such_package", RecipeError):
        section(kind, module="mine.py:needy").load()
