"""Halves micro-batches that do not fit into memory, and repeats the step.

    plugins:
      - auto-micro-batch

A step keeps its samples, so results differ only by the order of sums. ``micro_batch.json`` in the run folder holds the
sizes that later runs of the recipe start with. ``out_of_memory/`` holds the contents of the memory (CUDA: for
pytorch.org/memory_viz). With several processes the run ends; started again with ``--resume`` or by torchrun's
``--max-restarts``, all use the smaller batch. On a CPU, the system kills the process unless ``limit_gib`` is set.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastloop import FastloopError, Plugin, Problem, UsageError, hookimpl, option
from fastloop.problem import counted
from fastloop.recipe import secrets
from fastloop.runtime import files, platform_support
from fastloop_plugins.memory._out_of_memory import free_tensors, is_out_of_memory, write_memory_report

if TYPE_CHECKING:
    from fastloop import Run


class OutOfMemory(FastloopError):
    """A batch did not fit. The run must be started again, to continue with smaller batches."""


def next_smaller_size(size: int, samples_of_step: int) -> int:
    """The largest micro-batch of at most half the size that divides the samples of a step.

    With 12 samples a step, 8 becomes 4, and 7 becomes 3. Steps keep their samples, and micro-batches are equal.
    """
    smaller = size // 2
    while samples_of_step % smaller != 0:
        smaller -= 1
    return smaller


class AutoMicroBatch(Plugin):
    """Halves micro-batches that do not fit into memory."""

    name = "auto-micro-batch"
    numerics = "reassociated"

    snapshot: bool = option("Write a report of the memory when it runs out.", default=True)
    limit_gib: float | None = option("CPU: limit of a process's data, in GiB; null: no limit.", default=None, gt=0)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.computing = False  # in a step's micro-steps, before any weight changes
        # split -> samples in a micro-batch, pieces to cut a plugin's micro-batches into
        self.sizes: dict[str, list[int]] = {}
        self.before: tuple[int, int] | None = None

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.limit_gib is not None and platform_support.resource is None:
            raise UsageError(
                f"limit_gib={self.limit_gib:g}: this platform has no memory limit.",
                code="unsupported-platform",
                place=str(self.name),
                remedy="Set it to null.",
            )
        path = run.folder / "micro_batch.json"
        size = None
        if run.is_main and path.is_file():
            size = json.loads(path.read_text())
        size = run.processes.all_gather_object(size)[0]
        if size is not None and size["recipe"] == self.recipe(run):
            self.apply_sizes(run, size["sizes"])
            samples = counted(run.loaders.micro_batch_size, "sample")
            self.log.info("starts with the size that fitted before: %s in a micro-batch", samples)

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if self.sizes and run.is_main:
            self.write(run)
        if self.limit_gib is not None and run.device.type == "cpu":
            import resource  # not on Windows

            self.before = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(self.limit_gib * 2**30), self.before[1]))

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
        self.apply_sizes(run, state["sizes"])

    @hookimpl
    def recover(self, run: Run, error: Exception, split: str | None) -> bool | None:
        if not is_out_of_memory(error) or not (self.computing or split):
            return None
        where = split or "train"
        loader = run.eval_loaders[split] if split else run.train_loader
        size = loader.micro_batch_size
        pieces = 1 if loader.sampler is None else loader.sampler.pieces
        samples_of_step = run.recipe.train.batch_size // run.world_size
        is_split_by_plugin = loader.sampler is not None and loader.sampler.split_step is not None
        if is_split_by_plugin:
            most_pieces = size if split else samples_of_step
            is_single_sample = pieces >= most_pieces
        else:
            is_single_sample = size == 1
        if is_single_sample:
            return None  # nothing is left to halve
        # training fails in the step after the counted ones, and an evaluation follows them
        step = run.state.step if split else run.state.step + 1
        if self.snapshot:
            write_memory_report(run, error, where, step)
        if is_split_by_plugin:
            pieces *= 2
            new_size = f"cut into {pieces}"
        else:
            size = size // 2 if split else next_smaller_size(size, samples_of_step)
            new_size = counted(size, "sample")
        self.sizes[where] = [size, pieces]
        free_tensors(error)
        self.write(run)
        if run.world_size > 1:
            raise OutOfMemory(
                f"micro-batches of {where} do not fit into memory at step {step}: {new_size} from here on, when the "
                "run is started again with --resume.",
                code="out-of-memory",
                place=f"process {run.rank}",
            ) from error
        self.log.warning(
            Problem(
                f"micro-batches of {where} do not fit into memory at step {step}: {new_size} from here on.",
                code="out-of-memory",
            )
        )
        self.apply_sizes(run, self.sizes)
        if not split:
            from fastloop.checks import batch_norm  # imports torch

            batch_norm.check_run(run)
        return True

    def apply_sizes(self, run: Run, sizes: dict[str, list[int]]) -> None:
        """Reduce the micro-batches of each split to these sizes. Never increases one."""
        for split, (size, pieces) in sizes.items():
            loader = run.train_loader if split == "train" else run.eval_loaders.get(split)
            if loader is None or (split == "train" and run.recipe.train.batch_size % (size * run.world_size)):
                continue  # from another number of processes, or another data section
            if size < loader.micro_batch_size or (loader.sampler is not None and pieces > loader.sampler.pieces):
                run.loaders.set_micro_batch_size(split, size, pieces)
                self.sizes[split] = [size, pieces]

    @staticmethod
    def recipe(run: Run) -> dict[str, Any]:
        """The recipe that the sizes are valid for, as JSON returns it."""
        recipe: dict[str, Any] = json.loads(
            json.dumps(secrets.hidden(run.recipe.to_dict()) | {"output": None, "processes": run.world_size})
        )
        return recipe

    def write(self, run: Run) -> None:
        """Write the sizes. A process that ran out of memory writes them itself, since the main process may be waiting
        for it."""
        text = json.dumps({"recipe": self.recipe(run), "sizes": self.sizes}, indent=1)
        files.write(run.folder / "micro_batch.json", text + "\n", hidden=True)

    @hookimpl
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        if self.sizes:
            summary["auto-micro-batch"] = {
                split: {"micro_batch": size, "pieces": pieces} for split, (size, pieces) in self.sizes.items()
            }

    @hookimpl
    def teardown(self) -> None:
        if self.before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, self.before)
