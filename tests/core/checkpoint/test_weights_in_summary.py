"""``summary.json`` names the weights that ``model/`` has: their step, kind and metrics.

``test_hook_details`` has the tests of its other values.

Modules:
    core/fastloop/checkpoint/run_summary.py
    core/fastloop/cli/summary.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recording_plugins import ScriptedScore, WeightRecorder
from safetensors.torch import load_file

from fastloop.cli.summary import describe_model, summary_rows
from fastloop.testing.runs import InterruptAtStep

SCORES = (0.5, 0.9, 0.7)
"""The values of the evaluations at steps 9, 18 and 27."""
BEST: dict[str, Any] = {"checkpoint-best": {"monitor": "score"}}
EMA: dict[str, Any] = {"ema": {"decay": 0.9}}


@pytest.mark.parametrize(
    ("plugins", "step", "weights", "score", "words"),
    [
        ([], 27, "trained", 0.7, "the last"),
        ([BEST], 18, "trained", 0.9, "the best"),
        ([EMA], 27, "averaged", 0.7, "the last"),
        ([BEST, EMA], 18, "averaged", 0.9, "the best"),
        ([BEST, {"ema": {"start": 20}}], 18, "trained", 0.9, "the best"),
        ([{"early-stopping": {"monitor": "score", "patience": 1}}], 27, "trained", 0.7, "the last"),
    ],
    ids=["plain", "best", "averaged", "best average", "best before the averages", "stopped early"],
)
def test_step_kind_and_metrics_are_those_of_the_exported_weights(tiny_run, plugins, step, weights, score, words):
    recorder = WeightRecorder()
    result = tiny_run([*plugins, ScriptedScore(*SCORES), recorder], epochs=3)
    summary = result.summary
    assert (summary["model_step"], summary["model_weights"]) == (step, weights)
    losses = [metrics["loss"] for split, metrics in result.recorder.metrics if split == "validation"]
    assert summary["model_metrics"] == {"loss": losses[step // 9 - 1], "score": score}
    exported = load_file(result.trainer.run.folder / "model" / "model.safetensors")
    evaluated = recorder.evaluated[step // 9 - 1]
    assert all(torch.equal(exported[name], tensor) for name, tensor in evaluated.items())
    shown = describe_model(summary)
    assert shown.startswith(f"weights of step {step}")
    assert shown.endswith(words)
    assert (f"score {score:.4f}" in shown) == (words == "the best"), "the row validation has those of the last weights"
    assert ("averaged" in shown) == (weights == "averaged")


def test_a_run_that_exported_nothing_has_no_step(tiny_run):
    stopped = tiny_run([BEST, ScriptedScore(*SCORES), InterruptAtStep()], epochs=3, output="run")
    assert [stopped.summary[f"model_{key}"] for key in ("step", "weights", "metrics")] == [None] * 3
    resumed = tiny_run([BEST, ScriptedScore(*SCORES)], epochs=3, output="run", resume=True)
    assert resumed.summary["model_step"] == 18
    assert resumed.summary["model_metrics"]["score"] == 0.9


def test_weights_that_were_not_evaluated_have_no_metrics(tiny_run):
    result = tiny_run(epochs=1, evaluate_every=None)
    assert result.summary["model_step"] == 9
    if result.trainer.run.state.evaluated_at != 9:
        assert result.summary["model_metrics"] is None
    else:
        assert result.summary["model_metrics"] == result.summary["validation"]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"epochs": 1}, "9 (1 whole epoch,"),
        ({"epochs": 2}, "18 (2 whole epochs,"),
        ({"epochs": None, "max_steps": 20}, "20 (2 whole epochs,"),
    ],
)
def test_the_summary_counts_the_epochs_that_ended(tiny_run, tmp_path, settings, shown):
    summary = tiny_run([], **settings).summary
    assert shown in summary_rows(summary, tmp_path)["steps"]
