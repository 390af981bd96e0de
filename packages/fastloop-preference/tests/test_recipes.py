"""The recipe that needs no network trains: one epoch of it."""

import json
from pathlib import Path

from preference_runs import fastloop

RECIPE = Path(__file__).parent.parent / "recipes" / "order.yaml"


def test_the_recipe_of_digits_learns_in_a_few_steps(tmp_path):
    fastloop([(str(tmp_path), "train", str(RECIPE), "train.epochs=1", "output=run")])
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert found["rewards/accuracies"] > 0.75
