"""Types for plugin authors and users of ``Trainer``: a real ``mypy --strict`` of a plugin package, with mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop_tools.new.command import render

pytestmark = pytest.mark.slow

CACHE = Path(__file__).parents[2] / ".mypy_cache" / "new_package"
"""mypy's results for torch and the like, which it checks by version and content. Without them, it reads torch for most
of its time."""

UNUSED = """
[[tool.mypy.overrides]]
module = [
  "sympy.*",
  "torch._decomp.*",
  "torch._dynamo.*",
  "torch._export.*",
  "torch._functorch.*",
  "torch._higher_order_ops.*",
  "torch._inductor.*",
  "torch._library.*",
  "torch._prims.*",
  "torch._prims_common.*",
  "torch._refs.*",
  "torch._subclasses.*",
  "torch.ao.*",
  "torch.distributed.*",
  "torch.export.*",
  "torch.fx.*",
  "torch.jit.*",
  "torch.onnx.*",
  "torch.testing.*",
  "transformers.*",
]
follow_imports = "skip"
"""
"""Parts of torch that no type of fastloop's API needs. They are most of what mypy would read."""

HEAD = """
from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop import Output, Plugin, Run, hookimpl, hookspec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class Hooks:
    @hookspec
    def after_steps(self, run: Run, degrees: float) -> None: "It is warm."

    @hookspec
    def after_cooling(self, run: Run) -> None: "It is cold."


class Freeze(Plugin):
    hookspecs = Hooks

    @dataclass(kw_only=True)
    class Config:
        rate: float = 0.1

"""
"""Declares a hook whose name is close to one of the core."""

MISTAKES = {
    "misspelled": (
        "@hookimpl\n    def before_stpe(self, run: Run) -> None: ...",
        "there is no hook 'before_stpe'. Did you mean 'before_step'?",
    ),
    "misspelled_name": (
        "@hookimpl(specname='after_epocs')\n    def anything(self) -> None: ...",
        "there is no hook 'after_epocs'. Did you mean 'after_epoch'?",
    ),
    "misspelled_own": (
        "@hookimpl\n    def afters_steps(self) -> None: ...",
        "there is no hook 'afters_steps'. Did you mean 'after_steps'?",
    ),
    "argument": (
        "@hookimpl\n    def before_step(self, run: Run, batch: object) -> None: ...",
        "before_step gets no argument 'batch'. Did you mean 'batches'?",
    ),
    "argument_with_default": (
        "@hookimpl\n    def before_step(self, run: Run | None = None) -> None: ...",
        "before_step: the argument 'run' must be positional and without a default, else it is not passed.",
    ),
    "own_argument": (
        "@hookimpl\n    def after_steps(self, degree: float) -> None: ...",
        "after_steps gets no argument 'degree'. Did you mean 'degrees'?",
    ),
    "config": ("def use(self) -> None: self.config.missing", '"Config" has no attribute "missing"'),
    "config_type": (
        "def use(self) -> str: return self.config.rate",
        'Incompatible return value type (got "float", expected "str")',
    ),
    "call": (
        "def use(self, run: Run) -> None: run.hooks.evaluate(run=run)",
        'Missing named argument "split" for "evaluate" of "HookTypes"',
    ),
    "call_type": (
        "def use(self, run: Run) -> None: run.hooks.evaluate(run=run, split=1)",
        'Argument "split" to "evaluate" of "HookTypes" has incompatible type "int"; expected "str"',
    ),
    "result": (
        "def use(self, run: Run) -> Path: return run.hooks.compute_loss(run=run, model=run.model, batch=0)",
        'Incompatible return value type (got "Output", expected "Path")',
    ),
    "misspelled_call": (
        "def use(self, run: Run) -> None: run.hooks.after_epocs(run=run)",
        "run.hooks has no hook 'after_epocs'. Did you mean 'after_epoch'?",
    ),
    "optimizer": (
        "def use(self, run: Run) -> None: run.optimizer.zero_grads()",
        '"RunOptimizer" has no attribute "zero_grads"',
    ),
}
"""Module -> a mistake in a plugin's class, and mypy's message."""

CORRECT = """
    @hookimpl
    def after_steps(self, degrees: float, unused: int = 0, *rest: int) -> None:
        rate: float = self.config.rate + degrees

    @hookimpl(optionalhook=True)
    def hook_of_another_plugin(self, any: int) -> None: ...

    @hookimpl(wrapper=True, specname="evaluate")
    def _evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        return (yield)

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        run.hooks.after_steps(run=run, degrees=loss.item())
        output: Output = run.hooks.compute_loss(run=run, model=run.model, batch=0)
        weights: dict[str, Tensor] = run.strategy.model_state(run)
        optimizer: Optimizer = run.optimizer["generator"]
        schedule(run.optimizer)


def schedule(optimizer: Optimizer) -> None: ...
"""
"""Correct uses of everything that a mistake is about."""

OTHER_CLASSES = """
from fastloop import Plugin, Run, hookimpl

from night_watch import declarations
from night_watch.correct import Freeze


class Inherits(Freeze):
    @hookimpl
    def after_cooling(self, run: Run) -> None:
        rate: float = self.config.rate


class DeclaresByModule(Plugin):
    hookspecs = declarations

    @hookimpl
    def after_rain(self, run: Run) -> None: ...


class Requires(Plugin):
    requires = ("steam", "slot:task")

    @hookimpl
    def after_steam(self, run: Run) -> None:
        run.hooks.after_steam(run=run, pressure=1.0)


class RequiresMissing(Plugin):
    requires = ("not-installed",)

    @hookimpl
    def after_stem(self, anything: int) -> None: ...
"""
"""Hooks that a base class in another module or a required plugin declares. The other plugin is not installed."""

DECLARATIONS = """
from fastloop import Run, hookspec


@hookspec
def after_rain(run: Run) -> None: "It is dry."
"""

WRONG_ARGUMENT_OF_REQUIRED = """
from fastloop import Plugin, hookimpl


class Requires(Plugin):
    requires = ("steam",)

    @hookimpl
    def after_steam(self, presure: float) -> None: ...
"""

STEAM = """
from fastloop import Plugin, hookspec

class Hooks:
    @hookspec
    def after_steam(self, run, pressure): "There is steam."

class Steam(Plugin):
    name = "steam"
    hookspecs = Hooks
"""

TRAINER = """
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fastloop import Plugin, Run, Trainer, hookimpl


class Watch(Plugin):
    name = "watch"

    @hookimpl
    def after_step(self, run: Run, loss: torch.Tensor) -> None: ...


model = nn.Linear(8, 3)
data = TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
common: dict[str, Any] = {"epochs": 3, "seed": 1}
trainer = Trainer(
    model,
    loader,
    data,
    plugins=["amp", {"ema": {"decay": 0.9}}, Watch()],
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": MulticlassAccuracy(3)},
    optimizer=optimizer,
    scheduler=scheduler,
    output=Path("runs/typed"),
    **common,
)
Trainer(model, loader, optimizer={"name": "SGD", "momentum": 0.9}, lr=0.1)
Trainer(model, loader, optimizer=torch.optim.SGD)
Trainer(model, loader, optimizer=partial(torch.optim.SGD, lr=0.1))
Trainer(
    model,
    loader,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
)
summary: dict[str, Any] = trainer.fit()
accuracy: float = trainer.validate()["accuracy"]
other: dict[str, float] = trainer.validate(loader)
scores: torch.Tensor = trainer.predict(data)["output"]
folder: Path = trainer.save_pretrained("saved")
step: int = trainer.run.state.step
"""
"""A user's script."""

TRAINER_MISTAKES = {
    "trainer.validat()": '"Trainer" has no attribute "validat"',
    "trainer.fit(3)": 'Too many arguments for "fit" of "Trainer"',
    "accuracy: str = trainer.validate()['accuracy']": 'expression has type "float", variable has type "str"',
    "trainer.save_pretrained(3)": 'Argument 1 to "save_pretrained" of "Trainer" has incompatible type "int"',
    "Trainer(model, loader, optimizer=3)": 'Argument "optimizer" to "Trainer" has incompatible type "int"',
    "Trainer(model, loader, scheduler='cosine')": 'Argument "scheduler" to "Trainer" has incompatible type "str"',
    "Trainer('model', loader)": 'Argument 1 to "Trainer" has incompatible type "str"; expected Module',
}
"""A line of another script -> mypy's message."""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Module -> mypy's messages about it, from one run over all of them."""
    folder = tmp_path_factory.mktemp("night_watch")
    modules = {name: f"{HEAD}    {mistake}\n" for name, (mistake, _) in MISTAKES.items()}
    modules |= {
        "correct": HEAD + CORRECT,
        "other_classes": OTHER_CLASSES,
        "declarations": DECLARATIONS,
        "wrong_argument_of_required": WRONG_ARGUMENT_OF_REQUIRED,
        "script": TRAINER,
        "wrong_script": "\n".join(
            ["from fastloop import Trainer", "from night_watch.script import loader, model, trainer", *TRAINER_MISTAKES]
        ),
    }
    files = render("night-watch")
    files["pyproject.toml"] += UNUSED
    files |= {f"src/night_watch/{name}.py": text for name, text in modules.items()}
    files |= {
        "site/steam.py": STEAM,
        "site/steam-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: steam\nVersion: 1.0\n",
        "site/steam-1.0.dist-info/entry_points.txt": "[fastloop.plugins]\nsteam = steam:Steam\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder / "site")}
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(CACHE)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found: dict[str, list[str]] = {}
    for file, message in re.findall(r"(?m)^(.*\.py):\d+: error: (.*)$", done.stdout):
        found.setdefault(Path(file).stem, []).append(message)
    return found


def test_new_package_is_clean(messages):
    assert "__init__" not in messages


def test_correct_uses_are_clean(messages):
    assert "correct" not in messages
    assert "other_classes" not in messages


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported(messages, mistake):
    (message,) = messages[mistake]
    assert MISTAKES[mistake][1] in message


def test_arguments_of_a_required_plugins_hook_are_checked(messages):
    (message,) = messages["wrong_argument_of_required"]
    assert message == "after_steam gets no argument 'presure'. Did you mean 'pressure'?  [fastloop]"


def test_a_script_with_trainer_is_checked(messages):
    assert "script" not in messages
    assert len(messages["wrong_script"]) == len(TRAINER_MISTAKES)
    for found, expected in zip(messages["wrong_script"], TRAINER_MISTAKES.values(), strict=True):
        assert expected in found


def test_every_message_belongs_to_a_mistake(messages):
    assert set(messages) == {*MISTAKES, "wrong_argument_of_required", "wrong_script"}
