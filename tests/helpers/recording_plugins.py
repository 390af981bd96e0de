"""Plugins that script metrics and record weights."""

from __future__ import annotations

import torch

from fastloop import Plugin, hookimpl


class ScriptedScore(Plugin):
    """Adds the metric ``score`` to each evaluation: the next of the given values."""

    name = "scripted-score"
    adds_metrics = {"score": "max"}

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = iter(values)

    @hookimpl(wrapper=True)
    def evaluate(self):
        metrics = yield
        return {**metrics, "score": next(self.values)}


def weights_on_host(run) -> dict[str, torch.Tensor]:
    """Copies of the weights on the CPU, where those of ``TinyResult`` and of files are."""
    return {name: weight.detach().cpu().clone() for name, weight in run.model.state_dict().items()}


class WeightRecorder(Plugin):
    """Records the weights after every step, and those in place during an evaluation."""

    name = "weight-recorder"
    runs_after = ("ema",)  # inside its wrapper

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, torch.Tensor]] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []

    @hookimpl
    def after_step(self, run) -> None:
        self.steps.append(weights_on_host(run))

    @hookimpl(wrapper=True)
    def evaluate(self, run):
        self.evaluated.append(weights_on_host(run))
        return (yield)
