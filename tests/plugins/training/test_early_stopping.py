"""The plugin ``early-stopping``."""

from __future__ import annotations

import pytest
from recording_plugins import ScriptedScore
from torch import nn

from fastloop import Trainer, UsageError
from fastloop.testing import expect_problem, tiny_data, tiny_model


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, (0.5, 0.6, 0.6, 0.55, 0.9), 4),
        ({"patience": 1}, (0.5, 0.6, 0.6, 0.7, 0.8), 3),
        ({"patience": 1, "min_delta": 0.2}, (0.5, 0.6, 0.9, 0.9, 0.9), 2),
        ({"patience": 1, "mode": "min"}, (0.5, 0.4, 0.3, 0.35, 0.1), 4),
        ({"threshold": 0.7}, (0.5, 0.6, 0.7, 0.8, 0.9), 3),
        ({"patience": 2}, (0.5, float("nan"), float("nan"), 0.9, 0.9), 3),
        ({"patience": 2}, (float("nan"), float("nan"), 0.9, 0.9, 0.9), 2),
        ({"patience": 3}, (0.1, 0.2, 0.3, 0.4, 0.5), 5),
    ],
)
def test_it_stops_when_the_metric_does_not_improve(tiny_run, caplog, options, values, epochs):
    caplog.set_level("INFO", logger="fastloop")
    result = tiny_run([{"early-stopping": {"monitor": "score", **options}}, ScriptedScore(*values)], epochs=5)
    assert result.summary["epochs"] == epochs
    assert result.summary["status"] == ("completed" if epochs == 5 else "stopped")
    if epochs < 5:
        reason = result.summary["reason"]
        assert reason.startswith("early-stopping: score ")
        assert f"stopped at step {result.summary['steps']}: {reason}" in caplog.text
    else:
        assert "stopped" not in caplog.text


def test_patience_is_restored_on_resume(tiny_run):
    values = (0.5, 0.4, 0.3, 0.2, 0.1)
    first = tiny_run([{"early-stopping": {"monitor": "score"}}, ScriptedScore(*values[:2])], epochs=2, output="run")
    assert first.summary["status"] == "completed"
    again = tiny_run(
        [{"early-stopping": {"monitor": "score"}}, ScriptedScore(*values[2:])], epochs=5, output="run", resume=True
    )
    assert again.summary["epochs"] == 4, "three evaluations without improvement, one of them before the resume"


def test_unknown_metric_error_lists_available_metrics(tiny_run):
    with expect_problem("unknown-metric plugins.early-stopping.monitor 'los' 'loss'", UsageError):
        tiny_run([{"early-stopping": {"monitor": "los"}}])


def test_without_an_evaluation_split_it_is_refused():
    trainer = Trainer(
        tiny_model(), tiny_data(), loss=nn.functional.cross_entropy, batch_size=8, plugins=["early-stopping"]
    )
    with expect_problem("unknown-split plugins.early-stopping.monitor", UsageError):
        trainer.fit()
