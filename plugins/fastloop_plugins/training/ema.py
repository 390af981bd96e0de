"""Keeps an exponential moving average of the weights, and uses it for evaluation and for the exported model.

    plugins:
      - ema: {decay: 0.999}

After every ``update_every``-th step, the average moves by ``1 - decay`` towards the weights. With ``warmup``, the decay
is at most ``(1 + n) / (10 + n)`` after ``n`` updates, so the average quickly leaves the initial weights.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, hookimpl, option

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run


class EMA(Plugin):
    """Averaged weights for evaluation and export."""

    name = "ema"
    numerics = "changes-training"
    # the outer wrapper, so that checkpoint-best keeps the weights that were evaluated
    runs_before = ("checkpoint-best",)
    description = "evaluates and exports averaged weights"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        decay: Annotated[float, option("Share of the old average that an update keeps.", gt=0, lt=1)] = 0.999
        update_every: Annotated[int, option("Optimizer steps between updates.", ge=1)] = 1
        warmup: Annotated[bool, option("Start with a smaller decay.")] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.average: dict[str, Tensor] = {}
        self.updates = 0
        self.final = False

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self.weights = {
            name: weight
            for name, weight in run.unwrap_model().named_parameters()
            if weight.requires_grad and weight.is_floating_point()
        }
        from fastloop.distributed.tensors import shard_like

        groups: dict[Any, list[str]] = {}  # torch cannot average weights of several meshes in one call
        for name, weight in self.weights.items():
            groups.setdefault(getattr(weight, "device_mesh", None), []).append(name)
        self.groups = list(groups.values())
        loaded, self.average = self.average, {name: weight.detach().clone() for name, weight in self.weights.items()}
        for name, tensor in loaded.items():
            self.average[name].copy_(shard_like(tensor, self.average[name]))

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step % self.config.update_every:
            return
        import torch

        self.updates += 1
        decay = (
            min(self.config.decay, (1 + self.updates) / (10 + self.updates))
            if self.config.warmup
            else self.config.decay
        )
        with torch.no_grad():
            for names in self.groups:
                averages, weights = ([tensors[name] for name in names] for tensors in (self.average, self.weights))
                torch._foreach_lerp_(averages, weights, 1 - decay)

    @hookimpl
    def after_fit(self) -> None:
        self.exchange()
        self.final = True  # from here on, the model has the averaged weights

    @hookimpl(wrapper=True)
    def evaluate(self) -> Generator[None, Any, Any]:
        with self.swapped():
            return (yield)

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"average": self.average, "updates": self.updates}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        training, self.average, self.updates = bool(self.average), state["average"], state["updates"]
        if training:  # a rollback during training
            self.before_fit(run)

    @contextmanager
    def swapped(self) -> Generator[None, None, None]:
        """Use the averages as the model's weights inside this context."""
        if self.final or not self.average:
            yield
            return
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Swap the model's weights with the averages, in place: compiled and wrapped models keep their tensors."""
        import torch

        with torch.no_grad():
            for name, weight in self.weights.items():
                kept = weight.clone()
                weight.copy_(self.average[name])
                self.average[name].copy_(kept)
