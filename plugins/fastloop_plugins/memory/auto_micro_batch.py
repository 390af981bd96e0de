"""Fits a run into the memory there is: micro-batches that do not fit are halved, and the step is done again.

    plugins:
      - auto-micro-batch

A step keeps its samples, in more micro-steps: the numbers are the same but for the order of sums. An evaluation that does not fit has its
own batches halved, and training's are left alone. What was found is in the summary and in ``fit_memory.json`` of the run folder: a run of
the same recipe there, resumed or new, begins with it. ``out_of_memory/`` has what the memory held (CUDA: for pytorch.org/memory_viz).

One process goes on at once. Several cannot agree while some of them wait for the gradients of the one that failed: the run ends, and all
begin with the smaller batch when it is started again (``--resume``; torchrun's ``--max-restarts`` does that by itself).

A CPU's system kills a process that takes too much: with ``limit_gib`` the allocation fails instead, and can be recovered from.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import FastloopError, Plugin, UsageError, hookimpl, option
from fastloop.recipe import secrets
from fastloop.runtime import files, platform_support
from fastloop_plugins.memory._out_of_memory import is_out_of_memory, let_go, post_mortem

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")


class OutOfMemory(FastloopError):
    """A batch did not fit, and the run must be started again to go on with smaller ones."""


class AutoMicroBatch(Plugin):
    """Halves batches that do not fit."""

    name = "auto-micro-batch"
    numerics = "reassociated"
    description = "halves micro-batches that do not fit into memory"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        snapshot: Annotated[bool, option("Write what the memory held when it ran out.")] = True
        limit_gib: Annotated[float | None, option("CPU: what a process's data may take, in GiB; null: no limit.", gt=0)] = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.computing = False  # in a step's micro-steps, before anything has changed
        self.sizes: dict[str, list[int]] = {}  # split -> samples a micro-batch, pieces that each of a plugin's is cut into
        self.before: tuple[int, int] | None = None

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.config.limit_gib is not None and not platform_support.LIMITS_MEMORY:
            raise UsageError(f"{self.name}: limit_gib={self.config.limit_gib:g}: this platform has no memory limit. Set it to null.")
        path, found = run.folder / "fit_memory.json", None
        if run.is_main and path.is_file():
            found = json.loads(path.read_text())
        found = run.processes.all_gather_object(found)[0]
        if found is not None and found["recipe"] == self.recipe(run):
            self.take(run, found["sizes"])
            logger.info("auto-micro-batch: begins with what fitted before: %s samples a micro-batch", run.loaders.micro_batch_size)

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if self.sizes and run.is_main:
            self.write(run)
        if self.config.limit_gib is not None and run.device.type == "cpu":
            self.before = platform_support.limit_memory(int(self.config.limit_gib * 2**30))

    @hookimpl
    def before_step(self) -> None:
        self.computing = True

    @hookimpl
    def after_backward(self) -> None:
        self.computing = False  # a failing optimizer may have changed some of the weights

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        self.take(run, state["sizes"])

    @hookimpl
    def recover(self, run: Run, error: Exception, split: str | None) -> bool | None:
        if not is_out_of_memory(error) or not (self.computing or split):
            return None
        where = split or "train"
        loader = run.eval_loaders[split] if split else run.train_loader
        size, pieces = loader.micro_batch_size, 1 if loader.sampler is None else loader.sampler.pieces
        whole = size if split else run.recipe.train.batch_size // run.world_size
        by_plugin = loader.sampler is not None and loader.sampler.split is not None
        if pieces >= whole if by_plugin else size == 1:
            return None  # a single sample does not fit
        if self.config.snapshot:
            post_mortem(run, error, where)
        if by_plugin:
            pieces *= 2
        else:
            size = max(part for part in range(1, size // 2 + 1) if split or whole % part == 0)
        self.sizes[where] = [size, pieces]
        let_go(error)
        now = f"cut into {pieces}" if by_plugin else f"{size} samples"
        said = f"micro-batches of {where} do not fit into memory at step {run.state.step + 1}: {now} from here on"
        self.write(run)
        if run.world_size > 1:
            raise OutOfMemory(f"process {run.rank}: {said}, when the run is started again with --resume.") from error
        logger.warning("auto-micro-batch: %s", said)
        self.take(run, self.sizes)
        return True

    def take(self, run: Run, sizes: dict[str, list[int]]) -> None:
        """Read splits in such micro-batches, where they are smaller than those there are."""
        for split, (size, pieces) in sizes.items():
            loader = run.train_loader if split == "train" else run.eval_loaders.get(split)
            if loader is None or (split == "train" and run.recipe.train.batch_size % (size * run.world_size)):
                continue  # of other processes, or another data section
            if size < loader.micro_batch_size or (loader.sampler is not None and pieces > loader.sampler.pieces):
                run.loaders.set_micro_batch_size(split, size, pieces)
                self.sizes[split] = [size, pieces]

    @staticmethod
    def recipe(run: Run) -> dict[str, Any]:
        """What sizes are kept for, as JSON gives it back."""
        recipe: dict[str, Any] = json.loads(
            json.dumps(secrets.hidden(run.recipe.to_dict()) | {"output": None, "processes": run.world_size})
        )
        return recipe

    def write(self, run: Run) -> None:
        """Keep the sizes. A process that ran out of memory does it itself: the main one may wait for it."""
        files.write(run.folder / "fit_memory.json", json.dumps({"recipe": self.recipe(run), "sizes": self.sizes}, indent=1) + "\n")

    @hookimpl
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        if self.sizes:
            summary["fit_memory"] = {split: {"micro_batch": size, "pieces": pieces} for split, (size, pieces) in self.sizes.items()}
        if self.before is not None:
            platform_support.restore_memory_limit(self.before)
