"""Freezes a model's first layers one by one during training. Backward stops at the first layer that still trains.

    plugins:
      - layer-freezing: {share: 0.5, start: 0.2, until: 0.6}

The first layers of a network converge first. Between the fractions ``start`` and ``until`` of the run's steps, the
plugin freezes a fraction ``share`` of the layers, one after another. With the first layer it also freezes everything
before it, such as embeddings. Backward computes no gradients for a frozen layer, and the optimizer skips it. Method:
Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop.errors import did_you_mean

if TYPE_CHECKING:
    from fastloop import Run
    from torch import nn


class LayerFreezing(Plugin):
    """Freezes the first layers during training, more and more of them."""

    name = "layer-freezing"
    numerics = "changes-training"
    conflicts = {"slot:strategy": "strategies decide before training which weights have gradients."}

    share: float = option("Share of the layers that are frozen at the end.", default=0.5, gt=0, lt=1)
    start: float = option("Share of the run's steps after which freezing begins.", default=0.2, ge=0, lt=1)
    until: float = option("Share of the run's steps after which all of them are frozen.", default=0.6, gt=0, le=1)
    layers: str | None = option(
        "Name of the model's ModuleList or Sequential of layers; null: the longest outermost one.", default=None
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.start >= self.until:
            raise self.error("start", f"found {self.start}, which is not before until: {self.until}.")
        self.frozen = self.least = self.counted = 0
        self.with_gradients: list[int] = []

    @hookimpl
    def check_run(self, run: Run) -> None:
        where = f"{run.recipe.where}: plugin 'layer-freezing'"
        if run.world_size > 1:
            raise PluginError(
                f"{where} runs in one process: others would wait for gradients that frozen layers do not have."
            )
        if run.total_steps is None:
            raise PluginError(
                f"{where} needs the length of the run, and the data has no known length. Set train.max_steps."
            )
        self.blocks = self.find_layers(run.unwrap_model(), where)
        self.most = int(self.share * len(self.blocks) + 1e-9)  # 0.29 x 100 is a little less than 29
        if not self.most:
            self.log.warning(
                "nothing to freeze: share %g of the %d layers found in %s is none",
                self.share,
                len(self.blocks),
                type(run.unwrap_model()).__name__,
            )

    @hookimpl
    def before_step(self, run: Run) -> None:
        progress = (run.state.step / run.total_steps - self.start) / (self.until - self.start)
        due = max(self.least, int(self.most * min(max(progress, 0.0), 1.0) + 1e-9))
        if due <= self.frozen:
            return
        model = run.unwrap_model()
        before = {id(weight) for weight in self.blocks[due].parameters()}
        for weight in takewhile(lambda weight: id(weight) not in before, model.parameters()):
            weight.requires_grad_(False)
            weight.grad = None
        self.frozen = due
        self.log.info("step %d: the first %d of %d layers are frozen", run.state.step, due, len(self.blocks))

    @hookimpl
    def after_backward(self, run: Run) -> None:
        if self.with_gradients and self.counted == self.frozen:
            return
        self.with_gradients.append(
            sum(weight.numel() for weight in run.unwrap_model().parameters() if weight.grad is not None)
        )
        self.counted = self.frozen

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"frozen": self.frozen, "with_gradients": self.with_gradients}

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        self.least = self.counted = state["frozen"]  # a resumed run with more steps unfreezes none
        self.with_gradients = state["with_gradients"]

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["layer-freezing"] = {
            "layers": len(getattr(self, "blocks", ())),
            "frozen": self.frozen,
            "parameters_with_gradients": self.with_gradients,
        }

    def find_layers(self, model: nn.Module, where: str) -> list[nn.Module]:
        """The model's layers with trainable weights, in order.

        Raises:
            PluginError: The model has no module with the configured name.
        """
        from torch import nn

        name = self.layers
        if name is None:
            return max(sequences(model), key=len, default=[])
        named = {
            key: module for key, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
        }
        if name not in named:
            raise PluginError(
                f"{where}: layers: the model has no ModuleList or Sequential {name!r}.{did_you_mean(name, named)}"
            )
        return trained(named[name])


def sequences(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the trainable layers of each outermost ``ModuleList`` or ``Sequential`` that has several."""
    from torch import nn

    layers = trained(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    if len(layers) > 1:
        yield layers
        return
    for child in module.children():
        yield from sequences(child)


def trained(module: nn.Module) -> list[nn.Module]:
    """The children with trainable weights."""
    return [child for child in module.children() if any(weight.requires_grad for weight in child.parameters())]
