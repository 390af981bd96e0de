"""The recipe that needs no network trains: one epoch of it."""

import json
from pathlib import Path

from fastloop.testing import run_commands

RECIPE = Path(__file__).parent.parent / "recipes" / "order.yaml"


def test_the_recipe_of_digits_learns_in_a_few_steps(tmp_path):
    run_commands([(tmp_path, "train", RECIPE, "train.epochs=1", "output=run")])
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert found["rewards/accuracies"] > 0.75
