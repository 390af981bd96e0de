"""Losses by name, in ``module`` and ``text-classification``, against torch and scikit-learn.

Modules:
    plugins/fastloop_plugins/tasks/shared/losses.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import CODE, LR, assert_same, make_run, torch_loop, trained, user_code
from text_helpers import text_run
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import TensorDataset
from training_runs import execute

from fastloop import RecipeError, UsageError
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.tasks.shared.losses import ClassLoss, targets_of

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


TARGETS = """
def other_targets(kind, as_list=False):
    inputs, targets = data()["train"].tensors
    if kind == "ignored":
        targets[5::7] = -100
    elif kind == "without the last class":
        targets[targets == 2] = 1
    elif kind == "one-hot":
        targets = nn.functional.one_hot(targets).float()
    elif kind == "one-hot integers":
        targets = nn.functional.one_hot(targets)
    elif kind == "one-hot pairs":
        targets = nn.functional.one_hot(targets.clamp(max=1))
    elif kind == "numbers":
        targets = targets.double()
    samples = TensorDataset(inputs, targets)
    return {"train": [*samples] if as_list else samples}
"""


def targets(kind: str, as_list: bool = False) -> list[str]:
    """Settings for other targets: the function of ``TARGETS`` and its arguments."""
    Path("targets.py").write_text(CODE + TARGETS)
    return ["data.module=targets.py:other_targets", f"data.arguments={{kind: {kind}, as_list: {as_list}}}"]


@pytest.mark.parametrize("as_list", [False, True])
def test_balanced_does_not_count_ignored_targets(as_list):
    data = targets("ignored", as_list)
    made = user_code(CODE + TARGETS)["other_targets"]("ignored")["train"].tensors[1]
    counts = made[made >= 0].bincount()
    weights = (counts.sum() / (3 * counts.double())).tolist()
    weighted = trained(*data, loss={"name": "cross_entropy", "class_weights": weights})
    assert_same(trained(*data, loss={"name": "cross_entropy", "class_weights": "balanced"}), weighted)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("one-hot", "torch.float32"), ("numbers", "torch.float64")])
def test_balanced_needs_classes(kind, dtype, as_list):
    with expect_problem(f"wrong-weights loss.class_weights balanced {dtype} argmax", RecipeError):
        make_run(*targets(kind, as_list), loss={"name": "cross_entropy", "class_weights": "balanced"})
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["cross_entropy", "focal"])
@pytest.mark.parametrize(
    ("weights", "kind", "count"), [("balanced", "without the last class", 2), ([1.0] * 4, "ignored", 4)]
)
def test_weights_that_do_not_fit_the_logits_are_an_error(name, weights, kind, count):
    run = make_run(*targets(kind), loss={"name": name, "class_weights": weights})
    with expect_problem(f"wrong-weights loss.class_weights {count} weights (8, 3) (8,)", UsageError):
        execute(run)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("weights", [None, "balanced", [1.0, 2.0]])
@pytest.mark.parametrize(("kind", "width"), [("one-hot pairs", 2), ("one-hot integers", 3)])
def test_one_hot_integers_are_an_error(kind, width, weights, as_list):
    overrides = targets(kind, as_list)
    Path("pairs.py").write_text(CODE.replace("(width, 3)", f"(width, {width})"))
    run = make_run(*overrides, "model.module=pairs.py:Net", loss={"name": "focal", "class_weights": weights})
    with expect_problem(f"one-hot-targets module.loss (8, {width}) (8,) argmax", UsageError):
        execute(run)


def test_two_tokens_of_two_classes_are_not_one_hot():
    labels = torch.eye(2, dtype=torch.int64)[[0, 1, 1, 0, 1]]
    logits = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(0))
    loss = ClassLoss({"name": "cross_entropy", "class_weights": "balanced"}, "loss")
    loss.set_weights(lambda: targets_of(TensorDataset(logits, labels), "loss"))
    torch.testing.assert_close(loss(logits, labels), functional.cross_entropy(logits, labels), rtol=0, atol=0)


# -- text-classification -----------------------------------------------------------------------------------------------


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
