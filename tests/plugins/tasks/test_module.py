"""The task ``module``: code of your own beside the recipe.

Modules:
    core/fastloop/recipe/references.py
    plugins/fastloop_plugins/tasks/module.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_runs import execute

from fastloop import RecipeError
from fastloop.errors import UserCodeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.testing import expect_problem

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, inputs):
        return self.layers(inputs)

class WithLoss(Net):
    def forward(self, inputs, labels):
        logits = super().forward(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

def data(size=64, extra=None):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    split = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return {"train": split, "validation": split, **({extra: split} if extra else {})}

def as_mapping(samples):
    return {"inputs": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

def smooth(predictions, targets):
    return nn.functional.cross_entropy(predictions, targets, label_smoothing=0.1)

def needs_more():
    raise ImportError("no module named moon. Install it: pip install moon")

number = 3
"""

GOOD: dict[str, Any] = {
    "model": {"module": "code.py:Net", "arguments": {"hidden": 16}},
    "data": {"module": "code.py:data"},
    "train": {"epochs": 2, "batch_size": 8, "lr": 0.01, "device": "cpu"},
    "plugins": [
        {"module": {"loss": "cross_entropy", "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}}}
    ],
    "output": "out",
}


def train(changes: dict[str, Any] | None = None, folder: str = ".") -> dict[str, Any]:
    """Train the good recipe with dotted keys changed."""
    tree = json.loads(json.dumps(GOOD))
    for key, value in (changes or {}).items():
        place: Any = tree
        *parents, last = key.split(".")
        for parent in parents:
            place = place[0][parent] if isinstance(place, list) else place[parent]
        place[last] = value
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "code.py").write_text(CODE)
    (Path(folder) / "r.yaml").write_text(yaml.safe_dump(tree))
    recipe = load_recipe(f"{folder}/r.yaml")
    return execute(build(resolve(recipe)))


def test_a_module_of_your_own_is_trained_and_measured():
    summary = train({"train.epochs": 10})
    assert summary["plugins"][0] == "module"
    assert summary["validation"]["accuracy"] > 0.8
    assert Path("out/model/model.safetensors").exists()


def test_the_file_is_found_beside_the_recipe_when_not_in_the_current_folder():
    assert train(folder="elsewhere")["status"] == "completed"


def test_a_model_that_returns_its_loss_and_a_collator_of_your_own():
    summary = train(
        {
            "model.module": "code.py:WithLoss",
            "plugins.module.loss": None,
            "plugins.module.collate": "code.py:as_mapping",
        }
    )
    assert summary["validation"]["accuracy"] > 0.3


def test_a_loss_of_your_own():
    assert train({"plugins.module.loss": "code.py:smooth"})["validation"]["loss"] != train()["validation"]["loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.module": "code.py"}, "wrong-format model.module 'code.py' file.py:name"),
        ({"model.module": "cod.py:Net"}, "file-missing model.module cod.py"),
        ({"model.module": "code.py:Nett"}, "unknown-name model.module code.py 'Nett' 'Net'"),
        (
            {"model.module": "code.py:number"},
            "wrong-result model.module code.py:number",
        ),
        (
            {"model.module": "code.py:data", "model.arguments": {}},
            "wrong-result model.module torch.nn.Module",
        ),
        ({"model.module": "no_such_package.x:Net"}, "not-installed model.module 'no_such_package'"),
        ({"model.arguments": {"hiden": 3}}, "call-failed model.arguments"),
        ({"model.argument": {}}, "unknown-option model.argument 'arguments'"),
        (
            {"data.module": "code.py:Net"},
            "wrong-result data.module",
        ),
        ({"data.module": "code.py:needs_more"}, "import-failed data.module"),
        ({"data.arguments": {"extra": "evaluate"}}, "unknown-split data.module 'evaluate'"),
        ({"data.arguments": {"size": 0}}, "empty-split"),
        (
            {"plugins.module.loss": "cross_entrophy"},
            "unknown-loss plugins.module.loss 'cross_entrophy' 'cross_entropy'",
        ),
        (
            {"plugins.module.metrics": {"a": {"type": "MulticlassAcuracy"}}},
            "unknown-metric metrics.a.type 'MulticlassAccuracy'",
        ),
        (
            {"plugins.module.metrics": {"a": {"type": "MulticlassAccuracy", "classes": 3}}},
            "invalid-value plugins.module.metrics.a",
        ),
    ],
)
def test_module_error_has_key_and_writes_nothing(changes, message):
    with expect_problem(message, RecipeError):
        train(changes)
    assert not Path("out").exists()


def test_an_error_inside_the_model_names_its_file_and_line():
    Path("bad.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 3)\n\n    def forward(self, inputs):\n        return "
        "[self.layer(inputs)][1]\n"
    )
    with expect_problem("user-code-failed bad.py:9 IndexError", UserCodeError):
        train({"model.module": "bad.py:Net", "model.arguments": {}})


LOGITS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.scale

def data(logits, targets):
    split = TensorDataset(torch.tensor(logits), torch.tensor(targets))
    return {"train": split, "validation": split}
"""
LOGIT_METRICS: dict[str, tuple[str, dict[str, Any], list[Any], list[Any], float]] = {
    # the sigmoids of the logits are above the threshold of 0.5, so all classes are right
    "two classes": (
        "binary_cross_entropy_with_logits",
        {"type": "BinaryAccuracy"},
        [0.3, 0.4, 0.2, 0.1],
        [1.0, 1.0, 1.0, 1.0],
        1.0,
    ),
    "a task": (
        "binary_cross_entropy_with_logits",
        {"type": "Accuracy", "task": "binary"},
        [0.3, 0.4, 0.2, 0.1],
        [1.0, 1.0, 1.0, 1.0],
        1.0,
    ),
    "sets of classes": (
        "multilabel_soft_margin_loss",
        {"type": "MultilabelAccuracy", "num_labels": 2},
        [[0.3, 0.4], [0.2, 0.1]],
        [[1.0, 1.0], [1.0, 1.0]],
        1.0,
    ),
    # the sample of class 1 has the probability 0.52 of it, and those of class 0 have 0.56, 0.27 and 0.27
    "one class of several": (
        "cross_entropy",
        {"type": "MulticlassAUROC", "num_classes": 2},
        [[0.0, 0.1], [0.7, 0.95], [1.0, 0.0], [1.0, 0.0]],
        [1, 0, 0, 0],
        2 / 3,
    ),
}
"""Loss, metric, logits, targets, and the value of the metric."""


@pytest.mark.parametrize("case", LOGIT_METRICS)
def test_a_metric_takes_logits_between_0_and_1_for_logits(case, tmp_path, monkeypatch):
    """torchmetrics takes them for probabilities if all of an update are."""
    monkeypatch.chdir(tmp_path)
    loss, metric, logits, targets, value = LOGIT_METRICS[case]
    Path("code.py").write_text(LOGITS)
    tree = GOOD | {
        "model": {"module": "code.py:Net"},
        "data": {"module": "code.py:data", "arguments": {"logits": logits, "targets": targets}},
        "plugins": [{"module": {"loss": loss, "metrics": {"score": metric}}}],
    }
    train_section = tree["train"] | {"batch_size": 2, "lr": 1e-9, "epochs": 1}
    Path("recipe.yaml").write_text(yaml.safe_dump(tree | {"train": train_section}))
    summary = execute(build(resolve(load_recipe("recipe.yaml"))))
    assert summary["validation"]["score"] == pytest.approx(value)
