"""The packages of the project: the table is that of packages/, and a missing plugin says what to install.

Modules:
    core/fastloop/plugins/packages.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fastloop import PluginError
from fastloop.plugins.installed import installed
from fastloop.plugins.packages import COMMANDS, PACKAGES, PLUGINS, suggest_command, suggest_plugin
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe

ROOT = Path(__file__).resolve().parents[3]
MAIN = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def projects() -> dict[str, dict[str, Any]]:
    """The package of each folder in packages/ -> its table ``project``."""
    found = {}
    for file in (ROOT / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        assert project["name"] == file.parent.name
        found[project["name"]] = project
    return found


def test_the_table_has_every_package_with_its_plugins_and_commands():
    in_folders = {}
    for name, project in projects().items():
        points = project["entry-points"]
        in_folders[name] = (sorted(points.get("fastloop.plugins", {})), sorted(points.get("fastloop.commands", {})))
    in_table = {package.distribution: (sorted(package.plugins), sorted(package.commands)) for package in PACKAGES}
    assert in_table == in_folders


def test_packages_have_the_version_of_fastloop_and_their_extras_name_it():
    for name, project in projects().items():
        assert project["version"] == MAIN["version"], name
    for package in PACKAGES:
        if package.extra:
            assert MAIN["optional-dependencies"][package.extra] == [f"{package.distribution}=={MAIN['version']}"]


@pytest.mark.parametrize("name", sorted(PLUGINS))
def test_a_missing_plugin_of_a_package_says_what_to_install(name):
    package = PLUGINS[name]
    assert package.install in suggest_plugin(name, [])
    if name in installed():
        return
    for reference in (name, f"{package.distribution}:{name}"):
        with pytest.raises(PluginError) as error:
            resolve(make_recipe({"plugins": [reference]}), any_machine=True)
        assert package.install in str(error.value)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_missing_command_of_a_package_says_what_to_install(name):
    assert COMMANDS[name].install in suggest_command(name, [])


def test_a_misspelled_name_of_a_missing_plugin_gets_the_name():
    assert "'cpu-layers'" in suggest_plugin("cpu-layer", ["amp"])


def test_a_plugin_that_is_not_installed_can_be_left_out_and_a_misspelled_one_cannot():
    recipe = {"model": {"function": "none:none"}, "plugins": ["ema"]}
    resolved = resolve(make_recipe(recipe | {"plugins": ["ema", {"distill": False}]}), any_machine=True)
    assert "ema" in resolved.plugins.names()
    with pytest.raises(PluginError):
        resolve(make_recipe(recipe | {"plugins": ["ema", {"distil": False}]}), any_machine=True)
