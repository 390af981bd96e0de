"""A tiny classification task to train in the test's process, and plugins that record a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, Trainer, hookimpl, hookspecs


class Recorder(Plugin):
    """Records ``losses`` (a float per step), ``lrs`` and ``metrics`` (split, metrics)."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.metrics: list[tuple[str, dict[str, float]]] = []

    @hookimpl
    def after_step(self, run: Any, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        self.lrs.append(run.optimizer.param_groups[0]["lr"])

    @hookimpl
    def after_evaluate(self, split: str, metrics: dict[str, float]) -> None:
        self.metrics.append((split, dict(metrics)))


class Call(NamedTuple):
    """A hook that fired, and the names of its arguments."""

    hook: str
    arguments: tuple[str, ...]


class HookCalls(Plugin):
    """Appends a ``Call`` to a list for every hook that fires. It wraps *first* hooks, so it does not change their
    results."""

    name = "hook-calls"

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls


def _make_hook(hook: str, arguments: tuple[str, ...], wraps: bool) -> Any:
    """An implementation for ``HookCalls``. pluggy passes the arguments in the function's signature."""
    append = "self.calls.append(call)"
    body = f"({append}, (yield))[1]" if wraps else append
    return hookimpl(wrapper=wraps)(
        eval(f"lambda self, {', '.join(arguments)}: {body}", {"call": Call(hook, arguments)})
    )


for _name, _spec in vars(hookspecs).items():
    if hasattr(_spec, "fastloop_spec"):
        _arguments = tuple(inspect.signature(_spec).parameters)
        setattr(HookCalls, _name, _make_hook(_name, _arguments, wraps=_spec.fastloop_spec["firstresult"]))


def tiny_data(size: int = 67, seed: int = 0) -> TensorDataset:
    """``size`` samples of 8 features (float32) and a label in {0, 1, 2} (int64)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def tiny_model(dropout: float = 0.1) -> nn.Module:
    """Two layers with dropout in between, always with the same initial weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class TinyResult:
    """The result of ``tiny_run``.

    Attributes:
        losses: Mean loss of each step.
        weights: Name -> the model's tensor after training, on the CPU.
        summary: Content of ``summary.json``.
        recorder: Learning rates and metrics; see ``Recorder``.
        trainer: The trainer; ``trainer.run`` is its run.
        model: The trained model.
    """

    def __init__(self, trainer: Trainer, summary: dict[str, Any], model: nn.Module, recorder: Recorder) -> None:
        self.trainer = trainer
        self.summary = summary
        self.model = model
        self.recorder = recorder
        self.losses: list[float] = recorder.losses
        self.weights: dict[str, torch.Tensor] = {
            name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()
        }


@pytest.fixture
def hook_calls() -> list[Call]:
    """Every hook that fires in ``tiny_run``, in order. To record other runs, add ``HookCalls(hook_calls)`` to their
    plugins."""
    return []


@pytest.fixture
def tiny_run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., TinyResult]:
    """Train the tiny model with given plugins: ``tiny_run(["my-plugin"], epochs=2).losses``. Batches of 8, AdamW, lr
    1e-2, two epochs.

    Uses an accelerator if one is available, unless you pass ``device="cpu"``. A run that a signal stopped, after it was
    saved, has a result, too.
    """
    count = iter(range(1000))

    def run(plugins: Any = (), *, model: nn.Module | None = None, data: Any = None, **arguments: Any) -> TinyResult:
        model = model or tiny_model()
        recorder = Recorder()
        observers: list[Plugin] = [recorder]
        if "hook_calls" in request.fixturenames:
            observers.append(HookCalls(request.getfixturevalue("hook_calls")))
        data = data if data is not None else tiny_data()
        defaults = {
            "epochs": 2,
            "lr": 1e-2,
            "batch_size": 8,
            "loss": nn.functional.cross_entropy,
            "output": tmp_path / f"run{next(count)}",
        }
        trainer = Trainer(
            model, data, tiny_data(32, seed=1), plugins=[*plugins, *observers], **{**defaults, **arguments}
        )
        try:
            summary = trainer.fit()
        except (KeyboardInterrupt, SystemExit):
            if not hasattr(trainer, "run") or not trainer.run.interrupted:  # stopped at once
                raise
            summary = json.loads((trainer.run.folder / "summary.json").read_text(encoding="utf-8"))
        return TinyResult(trainer, summary, model, recorder)

    return run
