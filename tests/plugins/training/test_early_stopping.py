"""The plugin ``early-stopping``.

Modules:
    plugins/fastloop_plugins/training/_monitor.py
    plugins/fastloop_plugins/training/early_stopping.py
"""

from __future__ import annotations

import pytest
from recording_plugins import ScriptedScore
from torch import nn
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.wrappers import LambdaInputTransformer

from fastloop import Trainer, UsageError
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_plugins.tasks.shared.metrics import classifier_metrics
from fastloop_plugins.tasks.shared.two_classes import Decision
from fastloop_plugins.training._monitor import describe_metric


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


@pytest.mark.parametrize("plugin", ["early-stopping", "checkpoint-best"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_metric_with_other_settings_after_a_resume_is_a_warning(tiny_run, caplog, plugin, top_k):
    plugins = [{plugin: {"monitor": "hits"}}]
    tiny_run(plugins, metrics={"hits": MulticlassAccuracy(3)}, epochs=1, output="run")
    tiny_run(plugins, metrics={"hits": MulticlassAccuracy(3, top_k=top_k)}, epochs=2, output="run", resume=True)
    if top_k == 2:
        assert_problem(caplog, f"metric-changed {plugin} hits top_k=1 top_k=2")
    else:
        assert "before the break" not in caplog.text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Decision(), Decision(0.4)),
        (Decision(0.3), Decision(0.4)),
        (Decision(0.3), Decision(0.3, positive=0)),
    ],
)
def test_the_description_of_a_metric_names_the_decision_between_two_classes(first, second):
    of_first = classifier_metrics({}, {}, "r", 2, first)
    of_second = classifier_metrics({}, {}, "r", 2, second)
    assert describe_metric(of_first["f1"]) != describe_metric(of_second["f1"])
    assert describe_metric(of_first["f1"]) == describe_metric(classifier_metrics({}, {}, "r", 2, first)["f1"])


def test_the_description_of_a_metric_is_the_same_in_another_process():
    """no address of an object whose method the metric calls"""

    class Probabilities:
        def of(self, logits):
            return logits.sigmoid()

    first = LambdaInputTransformer(BinaryAUROC(), Probabilities().of)
    second = LambdaInputTransformer(BinaryAUROC(), Probabilities().of)
    assert describe_metric(first) == describe_metric(second)
    assert "Probabilities.of" in describe_metric(first)
