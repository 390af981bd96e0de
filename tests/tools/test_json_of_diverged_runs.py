"""JSON has no NaN and no infinity: what commands write about a run that has diverged is JSON for every reader.

Modules:
    core/fastloop/runtime/json_text.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fault_runs import write_recipe

PLUGINS = [
    {"module": {"loss": "cross_entropy", "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}}},
    {"nan_rows.py:NanRows": {}},
]
NAN_ROWS = """
from fastloop import Plugin, hookimpl

class NanRows(Plugin):
    \"\"\"Logs rows and a value that are not finite.\"\"\"

    name = "nan-rows"
    read_only = True

    @hookimpl
    def after_step(self, run):
        run.log("share", float("nan"))
        run.log_rows("samples", [{"score": float("inf"), "scores": [0.5, float("nan")]}])
"""


def strict(text: str) -> Any:
    """Read JSON as other languages do."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.slow
def test_files_of_a_diverged_run_are_json(cli):
    Path("nan_rows.py").write_text(NAN_ROWS)
    train = {"optimizer": "SGD", "lr": 1e38, "epochs": 1}
    write_recipe(train=train, plugins=PLUGINS, output="run")
    assert cli("sweep", "recipe.yaml", "train.lr=1e38,1e-2")[0] == 1  # its metric is NaN
    run = "run/lr-1e38"
    assert cli("evaluate", run, "--split", "validation", "--worst", "2", "--json", "results.json")[0] == 0
    assert cli("predict", run, "--split", "validation", "--out", "predictions.jsonl")[0] == 0
    assert cli("report", "run", run)[0] == 0

    files = [Path("results.json"), Path("predictions.jsonl"), *Path("run").rglob("*.json*")]
    texts = {str(path): path.read_text() for path in files if "checkpoints" not in path.parts}
    for name, text in texts.items():
        for part in text.splitlines() if name.endswith(".jsonl") else [text]:
            strict(part)
    assert {f"{run}/{name}" for name in ("summary.json", "metrics.jsonl", "rows/samples.jsonl")} < texts.keys()
    assert strict(texts[f"{run}/summary.json"])["validation"] == {"loss": None, "accuracy": None}
    assert strict(texts["results.json"])["metrics"] == {"loss": None, "accuracy": None}
    assert strict(texts["predictions.jsonl"].splitlines()[0])["probability"] is None
    sweep = strict(texts["run/sweep.json"])
    assert [(point["point"], point["finished"]) for point in sweep["points"]] == [
        ("train.lr=1e38", 0),
        ("train.lr=1e-2", 1),
    ]
    assert sweep["best"] == "train.lr=1e-2"
