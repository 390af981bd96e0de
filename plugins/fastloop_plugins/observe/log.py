"""Writes what happens to the run folder: ``metrics.jsonl`` (one object a log point) and ``log.txt``. On by default.

    plugins:
      - log: {every: 10}

A log point has the step, the epoch from 1 and, over the steps since the last one, the mean ``loss``, ``samples_per_second`` and
``tokens_per_second``. ``grad_norm`` is the total 2-norm of its own step's gradients before clipping (null: infinite), ``lr`` the learning
rate, ``memory_bytes`` what the device holds. A resumed run continues the same files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, hookimpl, option
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


class _LogFile(logging.FileHandler):
    """Raises nothing when the disk is full: the console shows a warning."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def read(tensors: list[Tensor]) -> list[float]:
    """The values of 0-dim tensors, which may differ in dtype, in one read of the device."""
    import torch

    values: list[float] = torch.stack(tensors).tolist() if tensors else []
    return values


class Log(Plugin):
    """metrics.jsonl and log.txt in the run folder."""

    name = "log"
    read_only = True
    numerics = "bitwise"
    description = "writes metrics.jsonl and log.txt"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        every: Annotated[int, option("Steps between two log points.", ge=1)] = 10

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[Tensor] = []  # of the steps since the last log point
        self.grad_norm: Tensor | None = None  # of the newest log point's step
        self.offset = 0  # where the last line that was written ends
        self.lost = False
        self.metrics: IO[bytes] | None = None
        self.handler: logging.Handler | None = None

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "every run keeps its log"

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if not run.is_main:
            return
        path = run.folder / "metrics.jsonl"
        path.touch()
        self.metrics = path.open("r+b")
        self.metrics.truncate(min(self.offset, path.stat().st_size))  # what a killed run wrote after its last checkpoint happens again
        self.offset = self.metrics.seek(0, os.SEEK_END)
        self.handler = _LogFile(run.folder / "log.txt")
        self.handler.setFormatter(secrets.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(self.handler)
        self.mark = (run.clock.read("train"), run.state.samples, run.state.tokens)

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        if (run.state.step + 1) % self.config.every == 0:  # on every process: shards of gradients are on all of them
            self.grad_norm = run.gradient_norm()

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        if not run.is_main:
            return
        self.losses.append(loss)
        if run.state.step % self.config.every:
            return
        from fastloop.runtime.clock import memory_held

        seconds, samples, tokens = run.clock.read("train"), run.state.samples, run.state.tokens
        elapsed = max(seconds - self.mark[0], 1e-9)
        assert self.grad_norm is not None
        *losses, grad_norm = read([*self.losses, self.grad_norm])
        self.write(
            run,
            loss=sum(losses) / len(losses),
            grad_norm=grad_norm,
            lr=run.optimizer.param_groups[0]["lr"],
            samples_per_second=(samples - self.mark[1]) / elapsed,
            tokens_per_second=(tokens - self.mark[2]) / elapsed,
            memory_bytes=memory_held(run.device),
        )
        self.losses.clear()
        self.mark = (seconds, samples, tokens)

    @hookimpl
    def after_evaluate(self, run: Run, split: str, metrics: dict[str, float]) -> None:
        self.write(run, split=split, **metrics)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        return {"offset": self.offset, "losses": read(self.losses)}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        import torch

        self.offset = state["offset"]
        self.losses = [torch.tensor(loss, device=run.device) for loss in state["losses"]]

    @hookimpl(trylast=True)
    def teardown(self) -> None:  # last, to record the errors of other plugins' teardown
        if self.metrics is not None:
            with contextlib.suppress(OSError):
                self.metrics.close()
            self.metrics = None
        if self.handler is not None:
            logger.removeHandler(self.handler)
            self.handler.close()
            self.handler = None

    def write(self, run: Run, **values: Any) -> None:
        """Append one line to ``metrics.jsonl`` (main process only)."""
        if self.metrics is None:
            return
        epoch = run.state.epoch + (run.state.epoch_samples > 0)
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}
        try:
            self.metrics.write((json.dumps({"step": run.state.step, "epoch": epoch} | finite) + "\n").encode())
            self.metrics.flush()  # what a full disk does not take is tried again with the next line
            self.offset = self.metrics.tell()
        except OSError as error:
            if not self.lost:
                logger.warning("log: %s cannot be written: %s. Lines may be lost", run.folder / "metrics.jsonl", error)
            self.lost = True
