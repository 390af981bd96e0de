"""The recipe that needs no network: a third of its steps."""

import json
from pathlib import Path

from fastloop.testing import run_commands

RECIPE = Path(__file__).parent.parent / "recipes" / "digits.yaml"


def test_the_reward_of_the_recipe_of_digits_rises(tmp_path):
    run_commands([(tmp_path, "train", RECIPE, "train.max_steps=100", "output=run")])
    points = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [point["reward"] for point in points if "split" not in point]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.6
