"""Shared by all tests: a tiny classification problem, and a recorder of what a run did.

Tests train for real, on the CPU, in the test's own folder.
"""

from __future__ import annotations

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, Trainer, hookimpl
from fastloop.cli.messages import Messages


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in an empty folder, on one thread (so that sums have one order), and leaves no global state."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("fastloop")
    level, propagate = logger.level, logger.propagate
    yield
    torch.set_num_threads(threads)
    logger.propagate = propagate  # the command line shows messages itself
    logger.setLevel(level)
    for handler in [handler for handler in logger.handlers if isinstance(handler, Messages)]:
        logger.removeHandler(handler)


class Recorder(Plugin):
    """Keeps what passes by: ``losses`` (a float a step), ``lrs``, ``metrics`` (split, metrics), ``hooks`` (names in order)."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.metrics: list[tuple[str, dict[str, float]]] = []
        self.hooks: list[str] = []

    @hookimpl
    def before_fit(self) -> None:
        self.hooks.append("before_fit")

    @hookimpl
    def before_epoch(self) -> None:
        self.hooks.append("before_epoch")

    @hookimpl
    def after_step(self, run: Any, loss: torch.Tensor) -> None:
        self.hooks.append("after_step")
        self.losses.append(loss.item())
        self.lrs.append(run.optimizer.param_groups[0]["lr"])

    @hookimpl
    def after_epoch(self) -> None:
        self.hooks.append("after_epoch")

    @hookimpl
    def after_evaluate(self, split: str, metrics: dict[str, float]) -> None:
        self.hooks.append("after_evaluate")
        self.metrics.append((split, dict(metrics)))

    @hookimpl
    def after_fit(self) -> None:
        self.hooks.append("after_fit")


def tiny_data(size: int = 67, seed: int = 0) -> TensorDataset:
    """``size`` samples of 8 features (float32) and a label in {0, 1, 2} (int64)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def tiny_model(dropout: float = 0.1) -> nn.Module:
    """Two layers with dropout between: the same initial weights at every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class TinyResult:
    """What ``tiny_run`` gives back."""

    def __init__(self, trainer: Trainer, summary: dict[str, Any], model: nn.Module, recorder: Recorder) -> None:
        self.trainer, self.summary, self.model, self.recorder = trainer, summary, model, recorder
        self.losses = recorder.losses
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., TinyResult]:
    """Train the tiny model with given plugins: ``tiny_run(["amp"], epochs=2).losses``. Batches of 8, AdamW, lr 1e-2, two epochs."""
    count = iter(range(1000))

    def run(plugins: Any = (), *, model: nn.Module | None = None, data: Any = None, **arguments: Any) -> TinyResult:
        model = model or tiny_model()
        recorder = Recorder()
        data = data if data is not None else tiny_data()
        defaults = {"epochs": 2, "lr": 1e-2, "batch_size": 8, "loss": nn.functional.cross_entropy, "output": tmp_path / f"run{next(count)}"}
        trainer = Trainer(model, data, tiny_data(32, seed=1), plugins=[*plugins, recorder], **{**defaults, **arguments})
        return TinyResult(trainer, trainer.fit(), model, recorder)

    return run
