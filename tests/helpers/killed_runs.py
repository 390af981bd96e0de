"""Runs of the tiny model in a process of their own, which a plugin may kill. It is not forked from the test: a forked
process cannot use an accelerator that the test has used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fastloop import Trainer
from fastloop.testing import Recorder, start, tiny_data, tiny_model


def train_tiny(plugins: Sequence[Any], model: nn.Module | None, arguments: dict[str, Any]) -> None:
    """Train as ``tiny_run`` does."""
    defaults = {"epochs": 2, "lr": 1e-2, "batch_size": 8, "loss": nn.functional.cross_entropy}
    trainer = Trainer(
        model or tiny_model(),
        tiny_data(),
        tiny_data(32, seed=1),
        plugins=[*plugins, Recorder()],
        **{**defaults, **arguments},
    )
    trainer.fit()


def exit_code(plugins: Sequence[Any], *, model: nn.Module | None = None, output: str | Path, **arguments: Any) -> int:
    """Train in a new process; returns its exit code, -9 after SIGKILL."""
    (ended,) = start(1, train_tiny, plugins, model, {"output": output, **arguments})
    assert ended.code is not None, ended.output
    return ended.code
