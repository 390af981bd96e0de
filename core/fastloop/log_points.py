"""Log points: every ``train.log_every`` steps, the core adds its values to the plugins' and calls ``log_scalars``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fastloop.runtime.clock import memory_held
from fastloop.scalars import CORE

if TYPE_CHECKING:
    from fastloop.run import Run


def start(run: Run) -> None:
    """Measure the speed from now on."""
    run.scalars.mark = run.clock.read("train"), run.state.samples, run.state.tokens


def after_step(run: Run, loss: Tensor) -> None:
    """Keep a step's loss. At a log point, read all values and call ``log_scalars``. Every process must call it."""
    scalars = run.scalars
    if not scalars.enabled:
        return
    if run.processes.is_main:
        scalars.values.setdefault("train/loss", []).append(loss)
    if run.state.step % run.recipe.train.log_every:
        return
    seconds, samples, tokens = scalars.mark
    start(run)
    elapsed = max(scalars.mark[0] - seconds, 1e-9)
    if run.is_main:
        lr = run.optimizer.param_groups[0]["lr"]
        scalars.values["train/lr"] = [lr.to(run.device, non_blocking=True) if isinstance(lr, Tensor) else lr]
    values = scalars.take(run.processes) | {
        "train/samples_per_second": (scalars.mark[1] - samples) / elapsed,
        "train/tokens_per_second": (scalars.mark[2] - tokens) / elapsed,
        "train/memory_bytes": memory_held(run.device),
    }
    emit(run, {name: values.pop(name) for name in CORE if name in values} | values)


def emit(run: Run, values: Mapping[str, float]) -> None:
    """Call ``log_scalars`` on the main process."""
    if run.is_main:
        run.hooks.log_scalars(run=run, scalars=values, step=run.state.step)


def flush(run: Run) -> None:
    """Log the values of plugins since the last log point, at the end of a run. Every process must call it."""
    for name in CORE:
        run.scalars.values.pop(name, None)
    if values := run.scalars.take(run.processes):
        emit(run, values)
