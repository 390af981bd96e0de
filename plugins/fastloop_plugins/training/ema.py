"""Evaluates and exports an average of the weights: an exponential moving average (EMA), or their mean (SWA).

    plugins:
      - ema: {decay: 0.999}

After every ``update_every``-th step, the average moves by ``1 - decay`` towards the weights. With ``warmup``, the decay
is at most ``(1 + n) / (10 + n)`` after ``n`` updates, so the average quickly leaves the initial weights. The average of
weights in bf16 or fp16 is kept in float32, because a small update would be rounded away. Parameters that are frozen
when training begins have no average.

With ``mean``, the average is the plain mean of the weights at all updates: stochastic weight averaging (SWA, Izmailov
et al., 2018, https://arxiv.org/abs/1803.05407). Begin after most of the training, and update once an epoch:

    plugins:
      - ema: {mean: true, start: 7500, update_every: 500, batch_norm_batches: 100}

``batch_norm_batches`` estimates the statistics of batch norm for the averaged weights, before each evaluation and
before the export.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, hookimpl, option

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run

AVERAGED = "averaged"
"""``State.model_weights`` while the model has the averages."""


class EMA(Plugin):
    """Evaluates and exports averaged weights."""

    name = "ema"
    numerics = "changes-training"
    on_resume = {"batch_norm_batches": "free"}
    # the outer wrapper, so that checkpoint-best keeps the weights that were evaluated
    runs_before = ("checkpoint-best",)

    decay: float = option("Share of the old average that an update keeps.", default=0.999, gt=0, lt=1)
    update_every: int = option("Optimizer steps between updates.", default=1, ge=1)
    warmup: bool = option("Start with a smaller decay.", default=True)
    mean: bool = option("Take the plain mean of the updates; decay and warmup have no effect.", default=False)
    start: int = option("Optimizer steps before the first update.", default=0, ge=0)
    batch_norm_batches: int = option(
        "Micro-batches to estimate the statistics of batch norm on; 0: keep those of training.", default=0, ge=0
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.average: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}  # those that have an average
        self.low_precision: list[str] = []  # names of the weights in bf16 or fp16
        self.groups: list[list[str]] = []  # names of the other weights: one list for each device mesh
        self.updates = 0
        self.has_averaged_weights = False  # whether the model keeps the averages: after training

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.batch_norm_batches and run.train_loader.sampler is None:
            raise PluginError(
                f"{type(run.train_loader.dataset).__name__} is iterable, and its samples cannot be read again.",
                code="conflicting-values",
                place=f"{run.recipe.where}: plugins.ema.batch_norm_batches",
                remedy="Set it to 0.",
            )

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self._prepare_averages(run)

    def _prepare_averages(self, run: Run) -> None:
        """List the weights that have an average. Set each average to the loaded one, or else to a copy of its
        weight."""
        import torch

        from fastloop.distributed.tensors import shard_like

        self.weights = {}
        self.low_precision = []
        names_by_mesh: dict[Any, list[str]] = {}  # torch cannot average weights of several meshes in one call
        for name, weight in run.unwrap_model().named_parameters():
            if not weight.requires_grad or not weight.is_floating_point():
                continue
            self.weights[name] = weight
            if weight.dtype in (torch.bfloat16, torch.float16):
                self.low_precision.append(name)
            else:
                names_by_mesh.setdefault(getattr(weight, "device_mesh", None), []).append(name)
        self.groups = list(names_by_mesh.values())
        loaded = self.average
        self.average = {name: weight.detach().clone() for name, weight in self.weights.items()}
        for name in self.low_precision:
            self.average[name] = self.average[name].float()
        for name, tensor in loaded.items():
            self.average[name].copy_(shard_like(tensor, self.average[name]))

    @hookimpl
    def after_step(self, run: Run) -> None:
        step = run.state.step
        is_due = step > self.start and step % self.update_every == 0
        if not is_due:
            return
        if run.step_was_skipped():  # the average would count the same weights twice
            return
        import torch

        self.updates += 1
        decay = self.current_decay()
        with torch.no_grad():
            for names in self.groups:
                averages = [self.average[name] for name in names]
                weights = [self.weights[name] for name in names]
                torch._foreach_lerp_(averages, weights, 1 - decay)
            for name in self.low_precision:
                self.average[name].lerp_(self.weights[name].float(), 1 - decay)

    def current_decay(self) -> float:
        """The share of the old average that the current update keeps. ``updates`` counts it already."""
        if self.mean:
            return 1 - 1 / self.updates  # 0, 1/2, 2/3, ...
        if self.start and self.updates == 1:
            return 0.0  # the weights before ``start`` do not count: the first update replaces them
        if self.warmup:
            return min(self.decay, (1 + self.updates) / (10 + self.updates))
        return self.decay

    @hookimpl
    def after_fit(self, run: Run) -> None:
        from fastloop_plugins.training._batch_statistics import estimated

        if not self.updates:
            first_update = (self.start // self.update_every + 1) * self.update_every
            self.log.warning(
                Problem(
                    f"training ended after step {run.state.step}, and the first update is due after step "
                    f"{first_update}: the trained weights are used.",
                    code="never-updated",
                    place=f"{run.recipe.where}: plugins.ema",
                    remedy="Lower start or update_every.",
                )
            )
            return
        self.exchange()
        self.has_averaged_weights = True
        run.state.model_weights = AVERAGED
        with estimated(run, self.batch_norm_batches, restore=False):
            pass

    @hookimpl(wrapper=True)
    def evaluate(self, run: Run) -> Generator[None, Any, Any]:
        from fastloop_plugins.training._batch_statistics import estimated

        if self.has_averaged_weights or not self.updates:
            return (yield)
        with self.swapped(run), estimated(run, self.batch_norm_batches):
            return (yield)

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"average": self.average, "updates": self.updates}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        weights = dict(run.unwrap_model().named_parameters())
        check_form(state, {"average": {name: weights[name] for name in state["average"]}, "updates": 0})
        is_rollback = bool(self.average)  # before training, there are no averages
        self.average = state["average"]
        self.updates = state["updates"]
        if is_rollback:  # before_fit, which prepares the averages, is not called again
            self._prepare_averages(run)

    @contextmanager
    def swapped(self, run: Run) -> Generator[None, None, None]:
        """Use the averages as the model's weights inside this context."""
        # exchange rounds these averages to the dtype of the weights, so their float32 values are put back afterwards
        averages = {name: self.average[name] for name in self.low_precision}
        self.exchange()
        trained = run.state.model_weights
        run.state.model_weights = AVERAGED
        try:
            yield
        finally:
            run.state.model_weights = trained
            self.exchange()
            self.average |= averages

    def exchange(self) -> None:
        """Copy the averages into the model's weights, and the weights into ``average``.

        The weights stay the same tensors, because compiled and wrapped models hold them. In ``low_precision``, the
        average is in float32 and the weight is not, so ``average`` gets a new tensor: a copy of the weight.
        """
        import torch

        with torch.no_grad():
            for name, weight in self.weights.items():
                trained = weight.clone()
                weight.copy_(self.average[name])
                if name in self.low_precision:
                    self.average[name] = trained
                else:
                    self.average[name].copy_(trained)
