"""Writes loss, learning rate, speed and metrics for TensorBoard to ``tensorboard/`` in the run folder.

    plugins:
      - tensorboard: {every: 10}

Needs the extra: ``pip install 'fastloop[tensorboard]'``. View it with ``tensorboard --logdir runs``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Package, Plugin, hookimpl, option
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter

    from fastloop import Run


class TensorBoard(Plugin):
    """Writes scalars and the recipe for TensorBoard."""

    name = "tensorboard"
    read_only = True
    requirements = (Package("tensorboard", ">=2.18", extra="tensorboard"),)
    description = "writes curves for TensorBoard"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        every: Annotated[int, option("Steps between two points of the training curves.", ge=1)] = 10

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.writer: SummaryWriter | None = None

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if not run.is_main:
            return
        import yaml
        from torch.utils.tensorboard import SummaryWriter

        # hide points after the last checkpoint of a killed run: the run repeats them
        self.writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.state.step + 1 if run.state.step else None)
        self.writer.add_text("recipe", f"```yaml\n{yaml.safe_dump(secrets.hidden(run.recipe.to_dict()), sort_keys=False)}```", 0)
        self.mark = (run.clock.read("train"), run.state.samples)

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        if self.writer is None or run.state.step % self.config.every:
            return
        seconds, samples = run.clock.read("train"), run.state.samples
        points = {
            "train/loss": loss.item(),
            "train/lr": run.optimizer.param_groups[0]["lr"],
            "train/samples_per_second": (samples - self.mark[1]) / max(seconds - self.mark[0], 1e-9),
        }
        self.mark = (seconds, samples)
        for tag, value in points.items():
            self.writer.add_scalar(tag, value, run.state.step)

    @hookimpl
    def after_evaluate(self, run: Run, split: str, metrics: dict[str, float]) -> None:
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(f"{split}/{name}", value, run.state.step)
            self.writer.flush()

    @hookimpl
    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
