"""Metrics are tried on the first validation batch before training: the error names metric, both shapes and remedy.

Modules:
    plugins/fastloop_plugins/guards/metric_check.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import R2Score

from fastloop import Plugin, Problem, Trainer, UsageError, hookimpl
from fastloop.run import Run
from fastloop.testing import assert_problem, expect_problem, start

QUIET: list[Any] = [{"log": False}, {"progress": False}]


def split(size: int = 16, seed: int = 0) -> TensorDataset:
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))


class Steps(Plugin):
    """Counts optimizer steps and keeps their losses."""

    name = "steps"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @hookimpl
    def after_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())


def train(metrics: Any, evaluate: Any = None, *plugins: Any, **settings: Any) -> list[float]:
    """The losses of a training whose evaluation has these metrics."""
    steps, given = Steps(), {"batch_size": 8, "epochs": 2, "device": "cpu", "lr": 1e-2, "output": "run"} | settings
    model = given.pop("model", None) or net()
    loss = given.pop("loss", nn.functional.cross_entropy)
    test = given.pop("test", None)
    trainer = Trainer(
        model,
        split(),
        split(8, 1) if evaluate is None else evaluate,
        test,
        loss=loss,
        metrics=metrics,
        plugins=[steps, *plugins, *QUIET],
        **given,
    )
    try:
        trainer.fit()
    except UsageError as error:
        error.add_note(f"after {len(steps.losses)} steps")
        raise
    return steps.losses


def refused(metrics: Any, *arguments: Any, steps: int = 0, **settings: Any) -> Problem:
    """The problem with which a training with these metrics ends, after the given number of steps."""
    with pytest.raises(UsageError) as caught:
        train(metrics, *arguments, **settings)
    assert caught.value.__notes__ == [f"after {steps} steps"]
    return caught.value.problem


def test_a_wrong_number_of_classes_is_refused_before_the_first_step():
    problem = refused({"fine": MulticlassAccuracy(3), "top": MulticlassAccuracy(10)})
    assert_problem(
        problem, "metric-failed 'top' MulticlassAccuracy (8, 3) float32 (8,) int64 num_classes=10 num_classes 3."
    )


def test_other_shapes_are_refused_with_both():
    assert_problem(refused({"r2": R2Score()}), "metric-failed 'r2' R2Score (8, 3) float32 (8,) int64")


@pytest.mark.parametrize(
    ("metric", "shape"),
    [(MulticlassAccuracy(3, average=None), "(3,) float32"), (MulticlassConfusionMatrix(3), "(3, 3) int64")],
)
def test_a_metric_that_is_not_one_number_is_refused(metric, shape):
    assert_problem(refused({"m": metric}), f"metric-failed 'm' {shape} validation")


def test_the_test_split_is_tried_too():
    inputs = torch.randn(8, 4)
    problem = refused({"a": MulticlassAccuracy(3)}, test=TensorDataset(inputs, inputs[:, :3]))
    assert_problem(problem, "metric-failed test (8, 3) float32")


class NoLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(inputs), labels)}


class Mappings(TensorDataset):
    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        inputs, labels = super().__getitem__(index)
        return {"inputs": inputs, "labels": labels}


def test_a_model_without_predictions_is_refused():
    data = Mappings(*split().tensors)
    trainer = Trainer(
        NoLogits(),
        data,
        data,
        metrics={"a": MulticlassAccuracy(3)},
        batch_size=8,
        device="cpu",
        plugins=QUIET,
        output="run",
    )
    with expect_problem("metric-failed 'a'", UsageError):
        trainer.fit()


class Stream(IterableDataset[Any]):
    """Can be read once."""

    def __init__(self) -> None:
        self.samples = iter([split(16)[index] for index in range(16)])

    def __iter__(self) -> Any:
        return self.samples


def test_an_iterable_split_is_not_read_ahead_and_its_first_evaluation_names_the_metric():
    problem = refused({"top": MulticlassAccuracy(10)}, Stream(), steps=2)
    assert_problem(problem, "metric-failed 'top' MulticlassAccuracy (8, 3) float32")
    train({"top": MulticlassAccuracy(3)}, Stream(), epochs=1)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["validation"]["loss"] > 0


class TakesFourSamples(nn.Module):
    """Fails in an evaluation as torch does on a CPU without memory, for more than four samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training and len(inputs) > 4:
            torch.empty(1 << 50)
        return self.net(inputs)


def test_a_batch_that_does_not_fit_into_memory_is_left_to_auto_micro_batch(caplog):
    train({"a": MulticlassAccuracy(3)}, None, "auto-micro-batch", model=TakesFourSamples(), epochs=1)
    assert_problem(caplog, "out-of-memory a batch of validation metrics were not tried")
    assert_problem(caplog, "out-of-memory auto-micro-batch: validation at step 2: 4 samples from here on")
    assert [file.name for file in Path("run/out_of_memory").iterdir()] == ["step-2-rank-0.txt"]


def test_without_metric_check_the_first_evaluation_fails_and_names_the_split():
    metrics = {"fine": MulticlassAccuracy(3), "top": MulticlassAccuracy(3, average=None)}
    assert_problem(refused(metrics, None, {"metric-check": False}, steps=2), "metric-not-a-number 'top'")
    problem = refused({"fine": MulticlassAccuracy(3), "r2": R2Score()}, None, {"metric-check": False}, steps=2)
    assert_problem(problem, "metric-failed recipe validation RuntimeError")


class Noisy(TensorDataset):
    """Draws random numbers when it is read, and must be read by workers only where there are some."""

    workers = False

    def __getitem__(self, index: Any) -> Any:
        assert (get_worker_info() is not None) == self.workers
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(4), target


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_trying_metrics_changes_no_number(workers):
    data = Noisy(*split(8, 1).tensors)
    data.workers = workers > 0
    plugins = [
        {"dataloader-workers": {"num_workers": workers, "persistent_workers": persistent}}
        for persistent in (True, False)
    ]
    runs = [
        train(metrics, data, *([plugin] if workers else []))
        for plugin in plugins
        for metrics in (None, {"a": MulticlassAccuracy(3)})
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_a_resumed_run_with_metrics_has_the_losses_of_the_whole_one():
    metrics, data = {"a": MulticlassAccuracy(3)}, Noisy(*split(8, 1).tensors)
    whole = train(metrics, data, save_every=1)
    first = train(metrics, data, save_every=1, max_steps=1, output="parts")
    assert first + train(metrics, data, save_every=1, output="parts", resume=True) == whole


class Graphs(Plugin):
    """How many graphs the compiler has made when training begins."""

    name = "graphs"
    found: Any = None

    @hookimpl
    def before_epoch(self) -> None:
        from torch._dynamo.utils import counters

        if self.found is None:
            self.found = counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_trying_metrics_compiles_nothing():
    graphs = Graphs()
    train({"a": MulticlassAccuracy(3)}, None, graphs, {"compile": {"backend": "eager"}})
    assert graphs.found == 0
    assert json.loads(Path("run/summary.json").read_text())["compile"]["graphs"] > 0


@pytest.mark.slow
def test_a_recipe_ends_with_one_line_and_exit_code_2():
    Path("code.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def net(): return torch.nn.Linear(4, 3)\n"
        "def data():\n"
        "    inputs = torch.randn(16, 4)\n"
        "    split = TensorDataset(inputs, inputs[:, :3].argmax(1))\n"
        "    return {'train': split, 'validation': split}\n"
    )
    recipe = {
        "model": {"module": "code.py:net"},
        "data": {"module": "code.py:data"},
        "train": {"batch_size": 8, "device": "cpu"},
        "plugins": [
            {"module": {"loss": "cross_entropy", "metrics": {"top": {"type": "MulticlassAccuracy", "num_classes": 10}}}}
        ],
        "output": "run",
    }
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = forked.run("-m", "fastloop", "train", "r.yaml", env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: r.yaml: the metric 'top' (MulticlassAccuracy) cannot measure a batch of validation"
    )
    assert "Traceback" not in done.stderr + done.stdout
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 0


class Sharded(Plugin):
    """Whether every weight is a shard when training begins."""

    name = "sharded"

    @hookimpl
    def before_epoch(self, run: Run) -> None:
        from torch.distributed.tensor import DTensor

        self.found = all(isinstance(parameter, DTensor) for parameter in run.model.parameters())


def on_two(strategy: str) -> tuple[str, str, bool]:
    """On one of two processes: how training ends with a wrong metric and with a fitting one, and whether weights are
    shards in it."""
    sharded, found = Sharded(), []
    for classes in (10, 3):
        try:
            train(
                {"a": MulticlassAccuracy(classes)},
                split(1),
                strategy,
                sharded,
                epochs=1,
                save_every=None,
                output=f"{strategy}-{classes}",
            )
            found.append("trained")
        except UsageError as error:
            found.append(str(error))
    return found[0], found[1], sharded.found


@pytest.mark.slow
# the second process has no sample to measure
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_processes_refuse_alike_and_weights_stay_sharded(strategy):
    ended = start(2, on_two, strategy)
    assert [process.code for process in ended] == [0, 0], ended
    for refusal, fitting, sharded in (process.result for process in ended):
        for name in ("'a'", "MulticlassAccuracy", "validation", "(1, 3)"):
            assert name in refusal
        assert fitting == "trained"
        assert sharded == (strategy == "fsdp")


class Metrics(Plugin):
    """Keeps the metrics of the last evaluation."""

    name = "metrics"
    found: Any = None

    @hookimpl
    def after_evaluate(self, metrics: dict[str, float]) -> None:
        self.found = metrics


def measured(samples: int, eval_batch_size: int) -> dict[str, float]:
    """The metrics of ``samples`` numbers and classes, which the model predicts with an error."""
    from torchmetrics import SpearmanCorrCoef
    from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

    class Signs(BinaryAUROC):
        def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
            super().update(predictions, (targets > 0).long())

    class Rows(BinaryAveragePrecision):
        def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
            super().update(predictions, (targets > 0).long())

    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    data, metrics = TensorDataset(inputs, inputs[:, 0].sin()), Metrics()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    kinds = {"r2": R2Score(), "spearman": SpearmanCorrCoef(), "auroc": Signs(), "precision": Rows()}
    settings = {"epochs": 1, "save_every": None, "eval_batch_size": eval_batch_size, "output": f"run-{samples}"}
    train(kinds, data, "ddp", metrics, model=model, loss=lambda found, _: found.square().mean(), **settings)
    return {name: float(value) for name, value in metrics.found.items()}


@pytest.mark.slow
# the second process has no sample to measure
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.filterwarnings("ignore:Metric `Spearman:UserWarning")
@pytest.mark.parametrize(
    ("samples", "eval_batch_size"), [(13, 1), (5, 8)], ids=["one sample a batch", "none on the second process"]
)
def test_metrics_of_two_processes_are_those_of_one(samples, eval_batch_size):
    """Of one sample, R2 has no value, so ``metric-check`` cannot compute it before training."""
    (alone,), both = (start(count, measured, samples, eval_batch_size) for count in (1, 2))
    for ended in both:
        assert ended.code == 0, ended.output
        assert ended.result == pytest.approx(alone.result, rel=1e-5)


def test_a_metric_of_one_class_in_the_first_batch_still_trains():
    """AUROC has no value for one class, and warns: the whole split has two."""
    from torchmetrics.classification import BinaryAUROC

    inputs = torch.randn(16, 4)
    data = TensorDataset(inputs, torch.tensor([0.0] * 8 + [1.0] * 8))
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    train(
        {"auroc": BinaryAUROC(), "a": BinaryAccuracy()},
        data,
        model=model,
        loss=lambda scores, _: scores.square().mean(),
    )
