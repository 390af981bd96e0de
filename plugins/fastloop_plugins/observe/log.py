"""Writes what happens to the run folder: ``metrics.jsonl`` (one object a log point) and ``log.txt``. On by default.

    plugins:
      - log: {every: 10}

A log point has the mean loss of the steps since the last one. A resumed run goes on in the same files.
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
    """Stays quiet when the disk is full: that is said on the console."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


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
        self.losses: list[Tensor] = []  # of the steps since the last log point; read together, so the device is waited for once
        self.offset = 0  # where the last line that was written ends
        self.lost = False
        self.metrics: IO[bytes] | None = None
        self.handler: logging.Handler | None = None

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "a run is worth a record"

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
    def after_step(self, run: Run, loss: Tensor) -> None:
        if not run.is_main:
            return
        self.losses.append(loss)
        if run.state.step % self.config.every:
            return
        from fastloop.runtime.clock import memory_held

        seconds, samples, tokens = run.clock.read("train"), run.state.samples, run.state.tokens
        elapsed = max(seconds - self.mark[0], 1e-9)
        self.write(
            run,
            loss=sum(self.read_losses()) / len(self.losses),
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
        return {"offset": self.offset, "losses": self.read_losses()}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        import torch

        self.offset = state["offset"]
        self.losses = [torch.tensor(loss, device=run.device) for loss in state["losses"]]

    @hookimpl
    def write_summary(self, run: Run) -> None:
        self.close()

    def read_losses(self) -> list[float]:
        """Losses of the steps since the last log point, in one read of the device."""
        import torch

        losses: list[float] = torch.stack(self.losses).tolist() if self.losses else []
        return losses

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

    def close(self) -> None:
        """Let go of both files."""
        if self.metrics is not None:
            with contextlib.suppress(OSError):
                self.metrics.close()
            self.metrics = None
        if self.handler is not None:
            logger.removeHandler(self.handler)
            self.handler.close()
            self.handler = None
