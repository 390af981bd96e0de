"""A small ``module`` recipe, and the same training as a plain loop of torch: their weights are compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from training_runs import execute

from fastloop import Plugin
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.run import Run
from fastloop.runtime import files

EPOCHS = 2
BATCH = 8
LR = 0.05
SEED = 7
SAMPLES = 64

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(4, width)
        blocks = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 3)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :3].argmax(1)
    targets[::3] = 0
    split = TensorDataset(inputs, targets)
    return {"train": split, "validation": split}

def sgd(params, lr, momentum=0.5):
    return torch.optim.SGD(params, lr=lr, momentum=momentum)

def returns_nothing(params, lr):
    return None

class Tripled(torch.optim.SGD):
    def __init__(self, params, lr=0.1, weight_decay=0.0, factor=3.0):
        super().__init__(params, lr=factor * lr, weight_decay=weight_decay)

def halves(optimizer, every=4):
    return torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)

number = 3
"""
"""The file ``code.py``: a model, its data, optimizers and a schedule."""


def user_code(code: str = CODE) -> dict[str, Any]:
    """The names that ``code`` defines: that of ``code.py``, or another one."""
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def make_run(
    *overrides: str,
    plugins: Any = (),
    loss: Any = "cross_entropy",
    model: Mapping[str, Any] | None = None,
    resume: Path | None = None,
    task: Mapping[str, Any] | None = None,
    objects: Sequence[Plugin] = (),
    **train: Any,
) -> Run:
    """Build the run of a recipe file ``r.yaml`` in the current folder. ``train`` are keys of that section, ``task`` of
    the task, ``objects`` plugins given in Python."""
    tree = {
        "model": {"module": "code.py:Net", **(model or {})},
        "data": {"module": "code.py:data"},
        "train": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "seed": SEED, "device": "cpu", **train},
        "plugins": [{"module": {"loss": loss, **(task or {})}}, *plugins],
        "output": "out",
    }
    # atomically, since processes of one folder write the same files
    files.write(Path("code.py"), CODE, durable=False)
    files.write(Path("r.yaml"), yaml.safe_dump(tree), durable=False)
    recipe = load_recipe("r.yaml", overrides)
    return build(resolve(recipe, objects=list(objects)), resume=resume)


def trained(*overrides: str, **settings: Any) -> dict[str, Tensor]:
    """Train the recipe of ``make_run``. Returns the weights."""
    run = make_run(*overrides, **settings)
    execute(run)
    return run.unwrap_model().state_dict()


def batches(epochs: int = EPOCHS) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches in the order that fastloop documents: one permutation an epoch."""
    inputs, targets = user_code()["data"]()["train"].tensors
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
        for ids in order.split(BATCH):
            yield inputs[ids], targets[ids]


def torch_loop(
    optimizers: Callable[[Any], Any],
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    scheduler: Callable[[Any], Any] | None = None,
) -> dict[str, Tensor]:
    """A plain loop over the same batches.

    Args:
        optimizers: Model -> an optimizer or a list of them. It may also change the model.
        scheduler: The first optimizer -> a scheduler.
    """
    model = user_code()["Net"]()
    made = optimizers(model)
    made = made if isinstance(made, list) else [made]
    schedule = scheduler and scheduler(made[0])
    for inputs, targets in batches():
        loss(model(inputs), targets).backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        if schedule:
            schedule.step()
    state: dict[str, Tensor] = model.state_dict()
    return state


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Compare weights bit for bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
