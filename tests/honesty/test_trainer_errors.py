"""A failure in the user's own code names its file and line.

Modules:
    core/fastloop/runtime/tracebacks.py
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from fastloop import Plugin, PluginCrash, Trainer, UsageError, hookimpl
from fastloop.errors import DataError
from fastloop.testing import expect_problem, tiny_data

QUIET: list[Any] = [{"log": False}, {"progress": False}]
HERE = Path(__file__)


def line_of(text: str) -> int:
    """The number of the one line of this file that ends in a comment."""
    (number,) = [number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {text}")]
    return number


class Fails(nn.Module):
    """Fails in one place or another; the layer takes 8 features."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(8, 3), where

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.where == "itself":
            return [self.layer(inputs)][1]  # itself
        if self.where == "a layer":
            return self.layer(inputs[:, :7])  # a layer
        return self.layer(Wrong.apply(inputs.requires_grad_()) if self.where == "backward" else inputs)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise KeyError("gradients")  # backward


def bad_loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return predictions.no_such_loss(targets)  # loss


class BadMetric(Metric):
    def update(self, *given: torch.Tensor) -> None:
        raise ZeroDivisionError("metric")  # metric

    def compute(self) -> float:
        return 0.0


def fit(
    model: nn.Module, loader: Any = None, loss: Any = nn.functional.cross_entropy, plugins: Any = (), **more: Any
) -> None:
    settings = {"epochs": 1, "batch_size": 4, "output": "run", "device": "cpu"} | more
    Trainer(model, loader or tiny_data(16), tiny_data(8), plugins=[*QUIET, *plugins], loss=loss, **settings).fit()


@pytest.mark.parametrize(
    ("place", "function", "kind", "arguments"),
    [
        ("itself", "forward", IndexError, {"model": Fails("itself")}),
        ("a layer", "forward", RuntimeError, {"model": Fails("a layer")}),
        ("backward", "backward", KeyError, {"model": Fails("backward")}),
        ("loss", "bad_loss", AttributeError, {"model": Fails(""), "loss": bad_loss}),
    ],
)
def test_user_error_is_raised_by_fit_with_traceback_and_note(place, function, kind, arguments):
    with pytest.raises(kind) as failed:
        fit(**arguments)
    assert type(failed.value) is kind
    (note,) = failed.value.__notes__
    assert re.fullmatch(rf"fastloop: your code failed at .*{HERE.name}:{line_of(place)} in {function}", note)
    frames = traceback.extract_tb(failed.value.__traceback__)
    assert (HERE.name, line_of(place)) in [(Path(frame.filename).name, frame.lineno) for frame in frames]
    assert "given" not in "".join(traceback.format_exception(failed.value))
    assert failed.value.__cause__ is None
    assert f"{HERE.name}:{line_of(place)} in {function}: {kind.__name__}" in Path("run/summary.json").read_text()


def test_a_metric_that_fails_is_refused_before_training_with_its_line():
    with expect_problem("metric-failed 'bad' BadMetric", UsageError) as failed:
        fit(Fails(""), metrics={"bad": BadMetric()})
    assert f"ZeroDivisionError: metric ({HERE}:{line_of('metric')} in update)" in str(failed.value)


def test_error_outside_user_code_is_raised_by_fit_unchanged():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(nn.Linear(7, 3))


def test_plugin_error_names_the_plugin():
    class Breaks(Plugin):
        name = "breaks"

        @hookimpl
        def after_step(self) -> None:
            raise ValueError("broken")

    with expect_problem("plugin-crashed 'breaks' after_step ValueError broken", PluginCrash):
        fit(Fails(""), plugins=[Breaks()])


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such image")  # dataset


def bad_collator(samples: list[Any]) -> Any:
    return samples["inputs"]  # collator


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("place", "function", "data", "collator", "message"),
    [
        ("dataset", "__getitem__", Unreadable(), None, "OSError: no such image"),
        ("collator", "bad_collator", tiny_data(16), bad_collator, "TypeError: list indices must be integers"),
    ],
)
def test_a_dataset_and_a_collator_are_named_by_their_line_also_from_a_worker(
    place, function, data, collator, message, workers
):
    with pytest.raises(DataError, match=rf"{message}.* \(.*{HERE.name}:{line_of(place)} in {function}\)$") as failed:
        fit(Fails(""), DataLoader(data, batch_size=4, collate_fn=collator, num_workers=workers))
    assert failed.value.__cause__ is not None


@pytest.mark.slow
def test_a_plugin_in_the_same_file_does_not_hide_the_models_line():
    class Beside(Plugin):
        name = "beside"

        @hookimpl
        def configure(self) -> None: ...

    with pytest.raises(IndexError) as failed:
        fit(Fails("itself"), plugins=[Beside()])
    assert f"{HERE.name}:{line_of('itself')} in forward" in failed.value.__notes__[0]


MODULE = """import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.layer(inputs[:, :7])


def data():
    return {"train": TensorDataset(torch.randn(16, 8), torch.zeros(16, dtype=torch.long))}


def late():
    raise LookupError("no data today")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "line"),
    [("data", r"error: net\.py:12 in forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied .*"),
     ("late", r"error: net\.py:20 in late: LookupError: no data today \[user-code-failed\]")],
)  # fmt: skip
def test_the_command_line_names_the_modules_line(data, line):
    Path("net.py").write_text(MODULE)
    Path("recipe.yaml").write_text(
        f'model: {{module: "net.py:Net"}}\ndata: {{module: "net.py:{data}"}}\ntrain: {{epochs: 1, batch_size: 4, '
        f"device: cpu}}\n"
        "plugins:\n  - module: {loss: cross_entropy}\n"
    )
    done = forked.run("-m", "fastloop", "train", "recipe.yaml")
    assert done.returncode == 1
    assert re.fullmatch(line, done.stderr.strip().splitlines()[-1])
    assert "plugin 'module'" not in done.stderr
