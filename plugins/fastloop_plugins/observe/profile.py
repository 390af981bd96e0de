"""Profiles a few training steps with torch's profiler.

    plugins:
      - profile: {wait: 5, warmup: 2, active: 5}

Each process writes two files; those of process 0 are ``profile/rank0.*.pt.trace.json.gz``, a trace for ui.perfetto.dev,
chrome://tracing and TensorBoard, and ``profile/rank0.operations.txt``, the operations that took longest. Both show the
loop's regions (``fastloop/data``) and plugins' hooks (``fastloop/ema.after_step``). With ``memory``, they show memory,
too, and each process writes the allocations on CUDA since training began to ``profile/rank0.memory.pickle``, for
pytorch.org/memory_viz.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import time_ns
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, Problem, hookimpl, option
from fastloop.problem import counted
from fastloop.runtime.files import write

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fastloop import Run


ROWS = 60
"""Rows in the table of operations."""


RECORDING = ("RECORD", "RECORD_AND_SAVE")
"""Names of torch's ``ProfilerAction`` of a step that is recorded."""


class Profile(Plugin):
    """Profiles a few steps. The traces show regions and hooks by name."""

    name = "profile"
    read_only = True
    numerics = "bitwise"

    wait: int = option("Steps to skip first.", default=5, ge=0)
    warmup: int = option("Profiled steps to discard: the first ones are slower.", default=2, ge=1)
    active: int = option("Steps to record.", default=5, ge=1)
    repeat: int = option("How often to skip, warm up and record; 0: until the end.", default=1, ge=0)
    memory: bool = option("Record allocations too.", default=False)
    shapes: bool = option("Record the shapes of operations' inputs too.", default=False)
    stacks: bool = option("Record the Python stack of operations too.", default=False)

    written: int  # traces
    recorded: int  # steps since the last trace
    records_allocations: bool
    folder: Path  # of the traces; from before_fit on
    prefix: str  # of the names of this process's files
    open: ExitStack  # ends the profiler and the history
    profiler: torch.profiler.profile

    @hookimpl
    def before_fit(self, run: Run) -> None:
        import torch
        from torch import profiler

        from fastloop_plugins.observe._hook_regions import hook_regions

        self.written = 0
        self.recorded = 0
        kinds = [profiler.ProfilerActivity.CPU]
        if run.device.type == "cuda":
            kinds.append(profiler.ProfilerActivity.CUDA)
        self.records_allocations = self.memory and run.device.type == "cuda"
        self.folder = run.folder / "profile"
        self.prefix = f"rank{run.rank}"
        self.open = ExitStack()
        if self.records_allocations:
            torch.cuda.memory._record_memory_history()
            self.open.callback(torch.cuda.memory._record_memory_history, enabled=None)
        self.profiler = self.open.enter_context(
            profiler.profile(
                activities=kinds,
                schedule=profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat),
                on_trace_ready=self.write,
                record_shapes=self.shapes,
                profile_memory=self.memory,
                with_stack=self.stacks,
                acc_events=True,
            )
        )
        self.open.enter_context(hook_regions(run.plugins))

    @hookimpl(trylast=True)
    def after_step(self) -> None:
        if self.profiler.current_action.name in RECORDING:
            self.recorded += 1
        self.profiler.step()

    @hookimpl
    def after_fit(self, run: Run) -> None:
        self.open.close()
        if not self.written:
            self.log.warning(
                Problem(
                    f"training ended after {counted(run.state.step, 'step')}, before any step was recorded: lower "
                    "wait.",
                    code="nothing-recorded",
                )
            )

    @hookimpl
    def teardown(self) -> None:
        if hasattr(self, "open"):
            self.open.close()

    def write(self, profiler: torch.profiler.profile) -> None:
        """Write the recorded steps. The profiler calls it after each cycle, and at its end."""
        if not self.recorded:  # training ended after the warm-up
            return
        import torch

        from fastloop_plugins.observe._trace_files import write_trace

        self.folder.mkdir(exist_ok=True)
        # as torch's tensorboard_trace_handler names them: TensorBoard finds the process by it
        write_trace(profiler, self.folder / f"{self.prefix}.{time_ns()}.pt.trace.json.gz")
        averages: Any = profiler.key_averages()
        by = (
            "self_device_time_total"
            if any(event.self_device_time_total for event in averages)
            else "self_cpu_time_total"
        )
        table = averages.table(sort_by=by, row_limit=ROWS, max_name_column_width=80)
        write(self.folder / f"{self.prefix}.operations.txt", table, durable=False, hidden=True)
        if self.records_allocations:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{self.prefix}.memory.pickle"))  # type: ignore[no-untyped-call]
        self.written += 1
        self.log.info("%s written to %s", counted(self.recorded, "step"), self.folder)
        self.recorded = 0
