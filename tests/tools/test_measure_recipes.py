"""Commands that discard the run folder leave out plugins that publish results, such as ``remote-output``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from fault_runs import RECIPE, write_recipe

from fastloop.cli.quick_checks import without_publishers
from fastloop.recipe import load_recipe
from fastloop_tools.bench.plan import make_ablation
from fastloop_tools.trials.measuring_process import Spec, measure

SHORT = ("--steps", "4", "--seconds", "0", "--warmup", "1", "--profile-steps", "2")
COMMANDS = {
    "train": ("train", "recipe.yaml"),
    "profile": ("profile", "recipe.yaml", *SHORT),
}


@pytest.fixture(autouse=True)
def _recipe() -> None:
    write_recipe(plugins=[RECIPE["plugins"][0], {"remote-output": {"url": "far"}}, "ema"], output="run")


@pytest.mark.parametrize("command", ["train", pytest.param("profile", marks=pytest.mark.slow)])
def test_only_a_run_that_is_kept_is_uploaded(cli, command):
    assert cli(*COMMANDS[command])[0] == 0
    assert Path("far").exists() == (command == "train")


def test_a_measured_process_uploads_nothing():
    tree = load_recipe("recipe.yaml").to_dict()
    found = measure(
        Spec(recipe=tree | {"output": "measured"}, source=None, warmup=1, steps=3), {"epochs": 1, "max_steps": None}
    )
    assert found.get("steps") == 3, found
    assert not Path("far").exists()


def test_bench_has_no_variant_of_a_plugin_that_publishes():
    recipe = load_recipe("recipe.yaml")
    ablation = make_ablation(recipe, [], leave_one_out=True)
    assert list(ablation.plugins) == ["ema"]
    assert without_publishers(recipe) == {"remote-output": False}


def test_a_plugin_in_a_file_can_declare_it():
    Path("mine.py").write_text(
        "from fastloop import Plugin\n\n\nclass Mine(Plugin):\n    name = 'mine'\n    publishes = True\n"
    )
    Path("other.yaml").write_text(yaml.safe_dump(RECIPE | {"plugins": [RECIPE["plugins"][0], "./mine.py"]}))
    assert without_publishers(load_recipe("other.yaml")) == {"mine": False}
