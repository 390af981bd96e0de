"""``auto`` and packages: whose plugins it asks, and that those of a package weaken no other choice silently.

Modules:
    plugins/fastloop_plugins/_own_plugins.py
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest

from fastloop import RecipeError
from fastloop.plugins.packages import PLUGINS
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime.hardware import Machine

pytest_plugins = ["installing"]

CPU = Machine("cpu", "AVX512", ("fp32", "bf16"), ("bf16",))
TEXTS = {"model": {"name": "distilbert-base-uncased"}, "data": {"name": "imdb", "text": "text", "label": "label"}}

SPEEDY = """
from fastloop import Plugin, Recommendation, hookimpl

class Speedy(Plugin):
    \"\"\"Is fast.\"\"\"
    name = "speedy"
    {declarations}

    @classmethod
    def recommend(cls, recipe, machine):
        {rule}
        return Recommendation(why="it is fast")
"""


def selected(*packages: str, plugins: tuple[Any, ...] = ()) -> Recipe:
    """The recipe after it is resolved for a CPU."""
    auto: Any = {"auto": {"packages": list(packages)}} if packages else "auto"
    return resolve(make_recipe(TEXTS | {"plugins": [auto, *plugins]}), CPU).recipe


@pytest.fixture
def speedy(install):
    """Install a package with a plugin: ``speedy(declarations, rule)``."""

    def put(declarations: str = "", rule: str = "pass") -> None:
        code = SPEEDY.format(declarations=declarations, rule=rule)
        install("speedy-kernels", code, speedy="speedy_kernels:Speedy")

    return put


def test_plugins_of_the_projects_packages_are_selected():
    names = {name for name, package in PLUGINS.items() if package.distribution == "fastloop-cpu"}
    names.remove("int8-linears")  # it changes predictions, so a recipe lists it
    assert names < selected().plugins.keys()


def test_a_plugin_of_another_package_is_selected_if_the_recipe_names_the_package(speedy):
    alone = selected()
    speedy()
    assert selected().plugins == alone.plugins, "an installed package is not asked"
    for name in ("speedy-kernels", "Speedy_Kernels"):
        recipe = selected(name)
        assert recipe.plugins == alone.plugins | {"speedy": {}}
        assert recipe.selected["speedy"] == "auto: it is fast"


@pytest.mark.parametrize(
    ("package", "hints"),
    [
        ("speedy-kernel", ["'speedy-kernels'", "pip install speedy-kernel"]),
        ("some-package", ["pip install some-package"]),
        ("fastloop-distill", ["pip install fastloop-distill"]),
        ("numpy", ["pip install numpy"]),
    ],
)
def test_a_package_that_is_not_installed_is_an_error(package, hints, speedy):
    if package == "fastloop-distill" and importlib.util.find_spec("fastloop_distill") is not None:
        pytest.skip("fastloop-distill is installed")
    speedy()
    with pytest.raises(RecipeError) as error:
        selected(package)
    assert "plugins.auto.packages" in str(error.value)
    for hint in hints:
        assert hint in str(error.value)


def test_a_package_is_kept_to_the_numerics_of_auto(speedy):
    speedy('numerics = "changes-training"')
    assert "speedy" not in selected("speedy-kernels").plugins


@pytest.mark.parametrize(
    "rule",
    [
        "recipe.plugins.pop('packing')",
        "recipe.plugins['packing'] = False",
        "recipe.plugins['amp']['dtype'] = 'fp16'",
        "recipe.train.lr = 1.0",
        "recipe.data['max_length'] = 8",
        "recipe.model['name'] = 'gpt2'",
    ],
)
def test_a_rule_that_changes_the_recipe_changes_nothing_and_is_reported(rule, speedy, caplog):
    options = ({"amp": {"dtype": "bf16"}},)
    alone = selected(plugins=options)
    speedy(rule=rule)
    recipe = selected("speedy-kernels", plugins=options)
    assert recipe.plugins == alone.plugins | {"speedy": {}}
    assert (recipe.train, recipe.model, recipe.data) == (alone.train, alone.model, alone.data)
    reported = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["speedy of speedy-kernels" in record.getMessage() for record in reported] == [True]


@pytest.mark.parametrize(
    ("declarations", "rule", "said"),
    [
        ("", "raise OSError('no driver')", "no driver"),
        ("", "return Recommendation(why='it is fast', options={'unknown': 1})", "unknown"),
        ("", "return {'why': 'it is fast'}", "AttributeError"),
    ],
)
def test_a_rule_that_fails_leaves_the_plugin_out_with_a_warning(declarations, rule, said, speedy, caplog):
    alone = selected()
    speedy(declarations, rule)
    assert selected("speedy-kernels").plugins == alone.plugins
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "speedy of speedy-kernels" in record.getMessage()
    assert said in record.getMessage()


@pytest.mark.parametrize("declarations", ["conflicts = {'packing': 'both pack.'}", "requires = ('not-there',)"])
def test_a_plugin_that_excludes_a_choice_of_auto_is_left_out(declarations, speedy):
    alone = selected()
    speedy(declarations)
    assert selected("speedy-kernels").plugins == alone.plugins


def test_a_plugin_that_replaces_a_default_one_is_reported(speedy, caplog):
    speedy("slot = 'metric-check'")
    recipe = selected("speedy-kernels")
    assert "speedy" in recipe.plugins
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "'metric-check'" in record.getMessage()


def test_a_choice_that_another_package_changes_is_reported(install, caplog):
    """``auto`` asks the first package before the second one, whose plugin changes options and rules of the first."""
    first = """
from fastloop import Plugin, Recommendation, option

class Wide(Plugin):
    \"\"\"Is wide.\"\"\"
    name = "wide"
    width: int = option("How wide.", default=8)

    @classmethod
    def recommend(cls, recipe, machine):
        return Recommendation(why="it is wide", options={"width": 1} if "speedy" in recipe.plugins else {})

class Shy(Plugin):
    \"\"\"Is shy.\"\"\"
    name = "shy"

    @classmethod
    def recommend(cls, recipe, machine):
        return None if "speedy" in recipe.plugins else Recommendation(why="it is shy")
"""
    install("a-pack", first, wide="a_pack:Wide", shy="a_pack:Shy")
    install("speedy-kernels", SPEEDY.format(declarations="", rule="pass"), speedy="speedy_kernels:Speedy")
    recipe = selected("a-pack", "speedy-kernels")
    assert recipe.plugins["wide"] == {"width": 1}
    assert "shy" not in recipe.plugins
    changed = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(changed) == 2
    assert all("speedy of speedy-kernels" in message for message in changed)
    assert any("wide" in message for message in changed)
    assert any("shy" in message for message in changed)
