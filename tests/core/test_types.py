"""Types for plugin authors and users of ``Trainer``: a real ``mypy --strict`` of a plugin package, with mistakes."""

from __future__ import annotations

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
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastloop import Output, Plugin, Run, hookimpl, hookspec, option

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class Hooks:
    @hookspec
    def after_steps(self, run: Run, degrees: float) -> None: "It is warm."


class Freeze(Plugin):
    hookspecs = Hooks

    match: str | list[str] = option("Pattern of parameter names, or a list of them.")
    rate: float = option("How fast.", default=0.1, gt=0)
    kind: Literal["hot", "cold"] = option("Which.", default="hot")
    names: list[str] = option("Names.", default_factory=list)

"""
"""Declares a hook and options."""

MISTAKES = {
    "option": ("def use(self) -> None: self.rates", '"Freeze" has no attribute "rates"; maybe "rate"?'),
    "option_type": (
        "def use(self) -> str: return self.rate",
        'Incompatible return value type (got "float", expected "str")',
    ),
    "option_union": (
        "def use(self) -> str: return self.match",
        'Incompatible return value type (got "str | list[str]", expected "str")',
    ),
    "option_choice": (
        "def use(self) -> bool: return self.kind == 'warm'",
        "Non-overlapping equality check (left operand type: \"Literal['hot', 'cold']\"",
    ),
    "default": ("size: int = option('How many.', default='one')", "Incompatible types in assignment"),
    "default_of_another_choice": (
        "other: Literal['hot', 'cold'] = option('Which.', default='warm')",
        'Argument "default" to "option" has incompatible type "Literal[\'warm\']"',
    ),
    "default_factory": (
        "sizes: list[int] = option('How many.', default_factory=dict)",
        'Argument "default_factory" to "option" has incompatible type',
    ),
    "error": (
        "def use(self) -> None: raise self.error(3, 'is cold.')",
        'Argument 1 to "error" of "Plugin" has incompatible type "int"; expected "str"',
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
    "optimizer": (
        "def use(self, run: Run) -> None: run.optimizer.zero_grads()",
        '"RunOptimizer" has no attribute "zero_grads"',
    ),
}
"""Module -> a mistake in a plugin's class, and mypy's message."""

CORRECT = """
    @hookimpl
    def after_steps(self, degrees: float, unused: int = 0, *rest: int) -> None:
        rate: float = self.rate + degrees
        patterns: list[str] = [self.match] if isinstance(self.match, str) else self.match
        kind: Literal["hot", "cold"] = self.kind
        self.names.append(kind)
        self.log.info("%s", rate)
        self.on_teardown(print, "it is over")

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
from fastloop import hookimpl

from night_watch.correct import Freeze


class Inherits(Freeze):
    @hookimpl
    def before_fit(self) -> None:
        rate: float = self.rate
"""
"""Reads an option of a base class in another module."""

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
        "script": TRAINER,
        "wrong_script": "\n".join(
            ["from fastloop import Trainer", "from night_watch.script import loader, model, trainer", *TRAINER_MISTAKES]
        ),
    }
    files = render("night-watch")
    files["pyproject.toml"] += UNUSED
    files |= {f"src/night_watch/{name}.py": text for name, text in modules.items()}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(CACHE)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
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


def test_a_script_with_trainer_is_checked(messages):
    assert "script" not in messages
    assert len(messages["wrong_script"]) == len(TRAINER_MISTAKES)
    for found, expected in zip(messages["wrong_script"], TRAINER_MISTAKES.values(), strict=True):
        assert expected in found


def test_every_message_belongs_to_a_mistake(messages):
    assert set(messages) == {*MISTAKES, "wrong_script"}
