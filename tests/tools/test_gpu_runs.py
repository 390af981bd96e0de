"""Runs on a GPU: the same losses as on the CPU, also after a resume, and the same results of the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import LANGUAGE, TEXTS, VECTORS, with_dropout, write_texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ROWS = "packages/fastloop-{}/tests/{}.py"
TASKS: dict[str, dict[str, Any]] = {
    "vectors": with_dropout(VECTORS, 0.0),
    "texts": with_dropout(TEXTS, 0.0),
    "language": with_dropout(LANGUAGE, 0.0) | {"plugins": ["causal-lm"]},
}
PREFERENCES = ROWS.format("preference", "preference_runs")
PAIRS = ROWS.format("embeddings", "text_runs")
PACKAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("language", {"module": f"{PREFERENCES}:pairs", "max_length": 32}),
    "kto": ("language", {"module": f"{PREFERENCES}:labelled", "max_length": 32}),
    "reward-model": ("language", {"module": f"{PREFERENCES}:pairs", "max_length": 32}),
    "embedding": ("texts", {"module": f"{PAIRS}:rows", "max_length": 32}),
    "reranker": ("texts", {"module": f"{PAIRS}:rows", "max_length": 32, "text": "first", "other": "second"}),
}
"""Task of a package -> the model that it trains, and the section ``data``."""


def make(task: str, *plugins: Any, output: str = "run", **train: Any) -> Any:
    """The recipe of a task, with a log point per step."""
    given = TASKS[task]
    settings = {"epochs": 3, "batch_size": 8, "lr": 3e-3, "log_every": 1, "max_grad_norm": 1.0, "save_every": None}
    tree = {"model": given["model"], "data": given["data"], "train": settings | train, "output": output}
    tree["plugins"] = [*given.get("plugins", ()), *plugins, {"progress": False}]
    return make_recipe(tree, Path("recipe.yaml"))


def train(recipe: Any) -> list[float]:
    """The losses of each step, and the metrics of each evaluation."""
    execute(build(resolve(recipe)))
    return points(Path(recipe.output))


def points(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("loss", "accuracy", "perplexity", "recall@10", "spearman", "rewards/margins")
    return [line[key] for line in lines for key in kept if key in line]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "vectors": ("vectors", [], {}),
    "accumulation": ("vectors", [{"device-prefetch": {}}], {"micro_batch_size": 2}),
    "texts": ("texts", [{"length-bucketing": {}}, {"fused-optimizer": {}}], {}),
    "texts-packed": ("texts", ["packing", "device-prefetch", "cls-last-layer"], {}),
    "language": ("language", [{"ema": {"decay": 0.9}}], {}),
    "language-packed": ("language", [{"packing": {}}, {"fused-loss": {}}], {"micro_batch_size": 4}),
    "lora": ("language", [{"lora": {"r": 4}}, {"activation-checkpointing": {}}], {}),
    "saving": ("language", ["async-save", "checkpoint-best"], {"save_every": 3, "evaluate_every": 5}),
    "muon": ("language", [], {"optimizer": {"name": "Muon"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_trains_as_the_cpu(case: str) -> None:
    task, plugins, options = CASES[case]
    on_gpu = train(make(task, *plugins, **options, device="auto", output="gpu"))
    assert len(on_gpu) > 10
    assert on_gpu == pytest.approx(train(make(task, *plugins, **options, device="cpu", output="cpu")), rel=5e-3)


@pytest.mark.parametrize("task", PACKAGES)
def test_tasks_of_packages_train_on_a_gpu_as_on_the_cpu(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "fastloop_embeddings" if task in ("embedding", "reranker") else "fastloop_preference"
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    model, data = PACKAGES[task]
    data = data | {"module": str(Path(__file__).parents[2] / data["module"])}
    monkeypatch.setitem(TASKS, task, TASKS[model] | {"data": data, "plugins": [task]})
    found = [
        train(make(task, device=device, output=device, micro_batch_size=4, epochs=2)) for device in ("auto", "cpu")
    ]
    assert len(found[0]) > 5
    assert found[0] == pytest.approx(found[1], rel=5e-3, abs=1e-4)


def test_auto_trains_about_as_well_as_the_plain_loop() -> None:
    """``auto`` uses bf16, packing and compilation here."""
    plain = train(make("texts", device="auto", output="plain", epochs=8))
    fast = train(make("texts", {"auto": {}}, device="auto", output="fast", epochs=8))
    assert sum(fast[-5:]) == pytest.approx(sum(plain[-5:]), rel=0.25)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_whole_steps_in_a_graph_train_as_steps_without_one(compiled: bool) -> None:
    """Packed rows of a few widths, in bf16, read ahead; the rate of each step is another one."""
    plugins: list[Any] = ["amp", "packing", "device-prefetch", "cls-last-layer", "fused-optimizer"]
    plugins += [{"lr-scheduler": {"warmup": 3}}] + [{"compile": {}}] * compiled
    settings = {"device": "auto", "epochs": 8, "evaluate_every": None}
    without = train(make("texts", *plugins, output="without", **settings))
    recorded = train(make("texts", *plugins, "step-graph", output="recorded", **settings))
    # sums of the attention's backward have another order in each run, which later steps magnify
    assert recorded[:30] == pytest.approx(without[:30], rel=2e-2)
    assert sum(recorded[-9:]) == pytest.approx(sum(without[-9:]), rel=0.1)
    counts = json.loads(Path("recorded/summary.json").read_text())["step_graph"]
    assert counts["replayed_steps"] > counts["other_steps"]


def test_a_resumed_run_has_the_same_losses() -> None:
    plugins: list[Any] = ["amp", "device-prefetch", {"ema": {"decay": 0.9}}]
    whole = train(make("language", *plugins, device="auto", output="whole", save_every=4))
    train(make("language", *plugins, device="auto", output="parts", save_every=4, max_steps=8))
    command = [sys.executable, "-W", "ignore", "-m", "fastloop", "train", "parts/recipe.yaml", "--resume"]
    command += ["train.max_steps=null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert points(Path("parts")) == pytest.approx(whole, rel=1e-6)


def test_predict_and_evaluate_give_the_results_of_the_cpu() -> None:
    train(make("texts", device="cpu"))
    results, rows = [], []
    for device in ("cpu", "auto"):
        for command in (
            ["predict", "run", "texts/validation.jsonl", "--out", f"{device}.jsonl"],
            ["evaluate", "run", "--split", "validation", "--json", f"{device}.json"],
        ):
            line = [sys.executable, "-W", "ignore", "-m", "fastloop", *command, f"train.device={device}"]
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
        rows.append([json.loads(line) for line in Path(f"{device}.jsonl").read_text().splitlines()])
        results.append(json.loads(Path(f"{device}.json").read_text())["metrics"])
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    assert [row["label"] for row in rows[0]] == [row["label"] for row in rows[1]]
