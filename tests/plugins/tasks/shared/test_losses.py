"""Losses and metrics by name, in ``module`` and ``text-classification``, against torch, torchmetrics and sklearn.

Modules:
    plugins/fastloop_plugins/tasks/shared/losses.py
    plugins/fastloop_plugins/tasks/shared/metrics.py
    plugins/fastloop_plugins/tasks/shared/two_classes.py
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import LR, assert_same, make_run, torch_loop, trained, user_code
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torchmetrics import AUROC, AveragePrecision, F1Score, MatthewsCorrCoef
from torchmetrics.classification import (
    BinaryFBetaScore,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassHingeLoss,
)
from torchmetrics.functional.classification import binary_auroc, binary_f1_score, multiclass_recall
from training_runs import execute

from fastloop import RecipeError
from fastloop.cli.summary import summary_rows
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import TEXTS, assert_problem, expect_problem, write_texts
from fastloop_plugins.tasks.shared.metrics import (
    classifier_metrics,
    names_of_scored_metrics,
    with_probabilities,
    with_sigmoids,
)
from fastloop_plugins.tasks.shared.two_classes import Decision
from fastloop_plugins.tasks.tags.metrics import tag_metrics

WEIGHTS = [1.0, 2.5, 0.25]


def focal(logits: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    """Focal loss, sample by sample, without weights."""
    probabilities = logits.softmax(1)[torch.arange(len(targets)), targets]
    return (-((1 - probabilities) ** gamma) * probabilities.log()).mean()


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def balanced() -> Tensor:
    """scikit-learn's ``compute_class_weight("balanced")``: ``n_samples / (n_classes * bincount(y))``."""
    counts = user_code()["data"]()["train"].tensors[1].bincount()
    return (counts.sum() / (3 * counts.double())).float()


LOSSES: dict[str, tuple[Any, Any]] = {
    "smoothing": (
        {"name": "cross_entropy", "label_smoothing": 0.1},
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
    ),
    "weights": (
        {"name": "cross_entropy", "class_weights": WEIGHTS},
        lambda x, y: functional.cross_entropy(x, y, torch.tensor(WEIGHTS)),
    ),
    "balanced and smoothing": (
        {"name": "cross_entropy", "class_weights": "balanced", "label_smoothing": 0.2},
        lambda x, y: functional.cross_entropy(x, y, balanced(), label_smoothing=0.2),
    ),
    "multi margin": (
        {"name": "multi_margin_loss", "margin": 0.5},
        lambda x, y: functional.multi_margin_loss(x, y, margin=0.5),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_weights_equal_those_of_a_plain_loop(case):
    recipe, loss = LOSSES[case]
    assert_same(trained(loss=recipe), torch_loop(adamw, loss))


def test_focal_loss_follows_its_formula_and_is_cross_entropy_for_gamma_0():
    theirs = torch_loop(adamw, focal)
    for name, tensor in trained(loss="focal").items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    plain = trained("output=plain")
    for name, tensor in trained("output=zero", loss={"name": "focal", "gamma": 0}).items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss", [{"name": "cross_entropy", "class_weights": WEIGHTS}, {"name": "focal", "class_weights": WEIGHTS}]
)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_micro_batches_give_the_weighted_loss_of_one_big_batch(loss, micro_batch):
    """Plain averages of micro-batch means would differ by several percent."""
    whole = trained("output=whole", loss=loss, optimizer="SGD")
    split = trained("output=split", loss=loss, optimizer="SGD", micro_batch_size=micro_batch)
    for name, tensor in split.items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-5, atol=1e-6)


def weighted_on_processes(output: str) -> dict[str, Tensor]:
    """The weights after training on this process and others, with uneven shares."""
    run = make_run(
        f"output={output}",
        loss={"name": "cross_entropy", "class_weights": WEIGHTS},
        optimizer="SGD",
        micro_batch_size=2,
        plugins=["ddp"],
    )
    execute(run)
    return run.unwrap_model().state_dict()


def test_processes_give_the_weighted_loss_of_one_big_batch(processes, tmp_path):
    theirs = torch_loop(
        lambda model: torch.optim.SGD(model.parameters(), lr=LR),
        lambda x, y: functional.cross_entropy(x, y, torch.tensor(WEIGHTS)),
    )
    for ended in processes(2, weighted_on_processes, "out", folder=tmp_path):
        for name, tensor in ended.result.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            {"name": "cross_entropy", "label_smooth": 0.1},
            "unknown-argument module.loss.label_smooth 'label_smoothing'",
        ),
        ({"label_smoothing": 0.1}, "missing-value module.loss"),
        ({"name": "cross_entropy", "reduction": "sum"}, "conflicting-values module.loss.reduction"),
        (
            {"name": "cross_entropy", "class_weights": [1.0, -1.0, 1.0]},
            "wrong-weights loss.class_weights [1.0 -1.0 1.0]",
        ),
        (
            {"name": "cross_entropy", "class_weights": {"a": 1.0}},
            "unknown-label loss.class_weights 'a'",
        ),
        (
            {"name": "cross_entropy", "class_weights": dict.fromkeys("qwertyuiop", 1.0)},
            "unknown-label loss.class_weights 'e'",
        ),
        (
            {"name": "focal", "label_smoothing": 0.1},
            "invalid-value label_smoothing cross_entropy",
        ),
        ({"name": "cross_entropy", "weight": [1.0, 1.0, 1.0]}, "conflicting-values module.loss.weight class_weights"),
        ({"name": "mse_loss", "class_weights": "balanced"}, "invalid-value loss.name 'mse_loss'"),
        ("focl", "unknown-loss torch.nn.functional 'focl'"),
    ],
)
def test_errors_name_the_key(loss, message):
    with expect_problem(message, RecipeError):
        make_run(loss=loss)
    assert not Path("out").exists()


# -- text-classification -----------------------------------------------------------------------------------------------


def text_run(*plugins: Any, output: str = "texts-run", **options: Any) -> Any:
    """A built run of a tiny BERT without dropout, on unbalanced labels."""
    write_texts(Path.cwd())
    file = Path("texts/train.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps(row) + "\n" for index, row in enumerate(rows) if row["label"] == 0 or index % 3 == 0)
    )
    config = {**TEXTS["model"]["config"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    micro = {"micro_batch_size": options.pop("micro_batch_size")} if "micro_batch_size" in options else {}
    recipe = make_recipe(
        {
            **TEXTS,
            "model": {**TEXTS["model"], "config": config},
            "train": {"device": "cpu", "epochs": 1, "lr": 0.01, "batch_size": 8, "optimizer": "SGD", **micro},
            "plugins": [{"text-classification": options}, *plugins],
            "output": output,
        }
    )
    return build(resolve(recipe))


def test_balanced_weights_come_from_the_training_labels():
    run = text_run(loss={"class_weights": "balanced"})
    counts = torch.from_numpy(run.datasets["train"].labels).bincount()
    assert counts[0] > counts[1] > 0
    (task,) = [plugin for plugin in run.plugins if plugin.name == "text-classification"]
    torch.testing.assert_close(task.criterion.weights, (counts.sum() / (2 * counts.double())).float(), rtol=0, atol=0)


def test_packed_rows_and_micro_batches_give_the_weighted_loss_of_one_big_batch():
    results = {}
    for name, plugins, options in (
        ("whole", [], {}),
        ("split", [], {"micro_batch_size": 2}),
        ("packed", ["packing"], {"micro_batch_size": 2}),
    ):
        run = text_run(*plugins, output=name, loss={"class_weights": {"0": 1.0, "1": 4.0}}, **options)
        execute(run)
        results[name] = run.unwrap_model().state_dict(), run.state.metrics["validation"]["loss"]
    for name in ("split", "packed"):
        assert results[name][1] == pytest.approx(results["whole"][1], rel=1e-4)
        for key, tensor in results[name][0].items():
            torch.testing.assert_close(tensor, results["whole"][0][key], rtol=1e-3, atol=1e-5)


def validation_logits(run: Any) -> tuple[Tensor, Tensor]:
    """The logits and labels of the validation split, one sample at a time."""
    dataset, collate = run.datasets["validation"], run.loaders.collators["validation"]
    batches = [collate([dataset[index]]).inputs for index in range(len(dataset))]
    model = run.unwrap_model().eval()
    with torch.no_grad():
        logits = [model(**{key: value for key, value in batch.items() if key != "labels"}).logits for batch in batches]
    return torch.cat(logits), torch.cat([batch["labels"] for batch in batches])


def test_metrics_and_a_threshold_beside_the_built_in_ones():
    metrics = {
        "auroc": {"type": "BinaryAUROC"},
        "recall": {"type": "MulticlassRecall", "average": "macro"},
        "acc": {"type": "Accuracy"},
    }
    run = text_run(metrics=metrics, threshold=0.4)
    execute(run)
    logits, labels = validation_logits(run)
    probability, found = logits.softmax(1)[:, 1], run.state.metrics["validation"]
    predicted = (probability > 0.4).long()
    assert set(found) == {"loss", "accuracy", "f1", *metrics}
    assert found["accuracy"] == pytest.approx((predicted == labels).float().mean().item())
    assert found["f1"] == pytest.approx(binary_f1_score(predicted, labels).item())
    assert found["auroc"] == pytest.approx(binary_auroc(probability, labels).item(), abs=1e-6)
    assert found["recall"] == pytest.approx(multiclass_recall(logits, labels, 2).item())
    assert found["acc"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


CENTERS = """
import torch
from torch import nn

class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.eye(3))

    def forward(self, predictions, targets):
        return (predictions - self.centers[targets]).square().mean()

centers = Centers()
"""


def test_parameters_of_a_loss_are_a_warning(caplog):
    Path("losses.py").write_text(CENTERS)
    make_run(loss="losses.py:centers")
    assert_problem(caplog, "parameters-left-out plugins.module.loss Centers centers")


@pytest.mark.parametrize("make", [classifier_metrics, tag_metrics], ids=["texts", "words"])
@pytest.mark.parametrize(
    "cls", [MulticlassAUROC, MulticlassAveragePrecision, MulticlassCalibrationError, MulticlassHingeLoss]
)
def test_metrics_of_probabilities_get_them_if_logits_look_like_some(cls, make):
    """torchmetrics takes values between 0 and 1 for probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(40, 3, generator=generator)
    labels = torch.randint(3, (40,), generator=generator)
    if make is classifier_metrics:
        metrics = classifier_metrics({"m": cls}, {"m": {}}, "r", 3, Decision())
    else:
        metrics = tag_metrics(["O", "B-a", "B-b"], None, {"m": cls}, {"m": {}}, "r")
    expected = cls(3)
    metrics["m"].update(logits, labels)
    expected.update(logits.softmax(1), labels)
    assert metrics["m"].compute() == pytest.approx(expected.compute().item())


class Doubled(BinaryFBetaScore):
    """A metric of a user."""

    def __init__(self) -> None:
        super().__init__(beta=2.0)


class OneOfSeveral(MulticlassAUROC):
    """A metric of a user."""


class OwnExponentials(MulticlassAUROC):
    """A metric of a user, of logits."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds.exp(), target)


class OwnThreshold(BinaryFBetaScore):
    """A metric of a user, of logits."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update((preds > 0).long(), target)


@pytest.mark.parametrize(
    ("make", "metric", "is_inherited"),
    [
        (with_probabilities, OneOfSeveral(3), True),
        (with_probabilities, OwnExponentials(3), False),
        (with_sigmoids, Doubled(), True),
        (with_sigmoids, OwnThreshold(beta=2.0), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_derived_metric_gets_probabilities_unless_it_has_an_update_of_its_own(make, metric, is_inherited):
    generator = torch.Generator().manual_seed(0)
    if make is with_probabilities:
        logits = torch.rand(40, 3, generator=generator)
        labels = torch.randint(3, (40,), generator=generator)
        probabilities = logits.softmax(1)
    else:
        logits = torch.rand(40, generator=generator) - 0.5 * (not is_inherited)
        labels = torch.randint(2, (40,), generator=generator)
        probabilities = logits.sigmoid()
    expected = copy.deepcopy(metric)
    expected.update(probabilities if is_inherited else logits, labels)
    other = copy.deepcopy(metric)
    other.update(logits if is_inherited else probabilities, labels)
    made = make({"m": metric})["m"]
    made.update(logits, labels)
    assert made.compute() == pytest.approx(expected.compute().item())
    assert made.compute() != pytest.approx(other.compute().item())


class OwnRule(MulticlassAccuracy):
    """A metric of a user, of logits."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update((preds[..., 1] > 1).long(), target)


def test_a_derived_metric_with_an_update_of_its_own_gets_logits_beside_a_threshold():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2, generator=generator)
    labels = torch.randint(2, (40,), generator=generator)
    metrics = classifier_metrics({"m": OwnRule}, {"m": {}}, "r", 2, Decision(threshold=0.4))
    expected = OwnRule(2)
    metrics["m"].update(logits, labels)
    expected.update(logits, labels)
    assert metrics["m"].compute() == pytest.approx(expected.compute().item())


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [(Doubled, {}), *((cls, {"task": "binary"}) for cls in (AUROC, F1Score, AveragePrecision, MatthewsCorrCoef))],
)
@pytest.mark.parametrize("positive", [0, 1])
def test_metrics_of_two_classes_get_the_probability_of_one_however_they_are_named(cls, arguments, positive):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2, generator=generator)
    labels = torch.randint(2, (40,), generator=generator)
    metrics = classifier_metrics({"m": cls}, {"m": arguments}, "r", 2, Decision(positive=positive))
    assert names_of_scored_metrics({"m": cls}, {"m": arguments}, 2) == ["f1", "m"]
    expected = cls(**arguments)
    metrics["m"].update(logits, labels)
    expected.update(logits.softmax(1)[:, positive], (labels == positive).long())
    assert metrics["m"].compute() == pytest.approx(expected.compute().item())


@pytest.mark.parametrize("threshold", [None, 0.4])
@pytest.mark.parametrize(("positive", "chosen"), [(None, 1), ("1", 1), ("0", 0), (0, 0)])
def test_the_recipe_names_the_class_that_metrics_of_two_classes_score(positive, chosen, threshold):
    metrics = {"auroc": {"type": "BinaryAUROC"}, "hits": {"type": "BinaryRecall"}}
    run = text_run(metrics=metrics, threshold=threshold, positive=positive)
    summary = execute(run)
    logits, labels = validation_logits(run)
    values = run.state.metrics["validation"]
    probability = logits.softmax(1)[:, chosen]
    predicted = (probability > (threshold or 0.5)).long()  # whether the chosen class is predicted
    targets = (labels == chosen).long()
    if threshold is None:
        assert 0 < predicted.sum() < len(predicted)
    assert values["f1"] == pytest.approx(binary_f1_score(predicted, targets).item())
    assert values["hits"] == pytest.approx((predicted * targets).sum().item() / targets.sum().item())
    assert values["auroc"] == pytest.approx(binary_auroc(probability, targets).item(), abs=1e-6)
    assert values["accuracy"] == pytest.approx((predicted == targets).float().mean().item())
    assert summary["metric_classes"] == dict.fromkeys(("f1", "auroc", "hits"), str(chosen))
    assert summary_rows(summary, run.folder)["positive"] == f"{chosen} (f1, auroc, hits)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positive": "10"}, "unknown-label text-classification.positive '10' '1'?"),
        ({"loss": "hinge"}, "invalid-value text-classification.loss.name 'hinge'"),
        (
            {"loss": {"label_smothing": 0.1}},
            "unknown-option text-classification.loss.label_smothing 'label_smoothing'",
        ),
        (
            {"loss": {"class_weights": [1.0]}},
            "wrong-weights loss.class_weights [1.0] 0 2",
        ),
        ({"loss": {"class_weights": {"0": 1.0}}}, "unknown-label loss.class_weights '1' 0 1"),
        (
            {"metrics": {"a": {"type": "BinaryAUC"}}},
            "unknown-metric text-classification.metrics.a.type 'BinaryAUC'",
        ),
        ({"metrics": {"f1": {"type": "BinaryAUROC"}}}, "name-taken metrics.f1 'f1'"),
        ({"threshold": 1.5}, "invalid-value text-classification.threshold 1.5"),
    ],
)
def test_errors_of_the_text_task_name_the_key(options, message):
    with expect_problem(message, RecipeError):
        text_run(**options)
