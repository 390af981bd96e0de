"""Profiles a few steps of a run: first timed without a profiler, then under torch's profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from fastloop.errors import UsageError
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import counted
from fastloop.runtime import platform_support
from fastloop.runtime.platform_support import page_faults
from fastloop.speedup_estimates import StepProfile
from fastloop_plugins.observe._hook_regions import hook_regions
from fastloop_plugins.observe._machine_speed import DTYPES, fault_seconds, peaks
from fastloop_plugins.observe._trace_files import write_trace
from fastloop_plugins.observe.speed_check import depth
from fastloop_tools.trials.measuring_process import Spec, StepMeter, WarningCollector
from fastloop_tools.trials.timeline import LAUNCH, OPERATION, DeviceTimeline, build_host_timeline, read_timeline

if TYPE_CHECKING:
    from fastloop.run import Run
    from fastloop.state import Batch


class ProfileObserver(StepMeter):
    """Times a window of steps, then records ``spec.profile_steps`` steps under the profiler, and stops the run.

    Args:
        trace: Where to write the trace; None: it is not kept.
    """

    name = "profile-observer"

    def __init__(self, spec: Spec, warnings: WarningCollector, trace: Path | None = None) -> None:
        super().__init__(spec, warnings)
        self.trace = trace
        self.timed: dict[str, Any] = {}
        self.longest: list[Any] = []  # numbers on the device, read after the window
        self.real = 0
        self.reserved: list[int] = []
        self.reading = 0.0  # seconds of this thread between steps
        self.ended = 0.0  # when the last step ended, in seconds of this thread
        self.begun = False  # the profiler
        self.last = 0  # step of the profiler
        self.recording = ExitStack()
        self.profile: StepProfile | None = None
        # when the window began: padded tokens, number of ``longest``, real tokens, page faults
        self.counts_before: tuple[Any, int, int, int]
        self.profiler: Any  # torch's, from the end of the window on

    @hookimpl
    def before_step(self, batches: list[Batch]) -> None:
        self.reading += thread_time() - self.ended
        super().before_step(batches)
        for batch in batches:
            if isinstance(batch.inputs, Mapping) and "input_ids" in batch.inputs:
                self.real += batch.tokens
                mask = batch.inputs.get("attention_mask")
                if isinstance(mask, Tensor) and mask.ndim == 2:
                    self.longest.append(len(mask) * mask.sum(1).max())
                else:
                    self.longest.append(batch.inputs["input_ids"].numel())

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        if run.device.type == "cuda" and not self.begun:
            self.reserved.append(torch.cuda.memory_reserved())
        super().after_step(run, loss)
        if self.begun and run.state.step == self.last:
            self.recording.close()
            run.state.request_stop("measured")
        self.ended = thread_time()

    def _start_window(self, run: Run) -> None:
        super()._start_window(run)
        self.counts_before = (self.padded, len(self.longest), self.real, page_faults())
        self.reading = 0.0
        self.ended = thread_time()

    def _end_window(self, run: Run) -> None:
        """Save the results of the timed window, and start the profiler."""
        self.timed = super().result(run)
        faults = page_faults()
        padded, longest, real, faults_before = self.counts_before
        steps = self.timed["steps"]
        self.timed |= {
            "padded": (self.padded - padded) / steps,
            "longest": sum(map(int, self.longest[longest:])) / steps,
            "real": (self.real - real) / steps,
            "page_faults": (faults - faults_before) / steps,
            "reading": self.reading / steps,
        }
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if run.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.begun = True
        self.last = run.state.step + self.spec.profile_steps
        self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True, with_flops=True, acc_events=True)
        self.recording.enter_context(hook_regions(run.plugins))
        self.recording.enter_context(self.profiler)

    def result(self, run: Run) -> dict[str, Any]:
        if self.profile is None:
            raise UsageError(
                f"training ended after {counted(run.state.step, 'step')}: too few to profile.",
                code="too-few-steps",
                remedy="Lower the warm-up or the steps.",
            )
        return self.timed | {"profile": self.profile.to_dict()}

    def _export(self, device: torch.device) -> DeviceTimeline | None:
        """Export the trace; on an accelerator, read the kernels from it."""
        with tempfile.TemporaryDirectory(prefix="fastloop-trace-") as folder:
            path = self.trace or Path(folder) / "trace.json"
            if self.trace is None and device.type == "cpu":
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(self.profiler, path)
            return None if device.type == "cpu" else read_timeline(path)

    @hookimpl
    def after_fit(self, run: Run) -> None:
        super().after_fit(run)
        self.recording.close()
        if not self.timed:
            return  # training was too short; ``result`` raises the error
        steps = self.spec.profile_steps
        timeline = self._export(run.device)
        window = self.timed["seconds_a_step"] * steps
        host = build_host_timeline(self.profiler.events()).scale(window)
        averages = []
        for event in self.profiler.key_averages():
            if OPERATION.match(event.key) and event.device_type == DeviceType.CPU:
                averages.append(event)
        if timeline is None:
            regions = host.regions
            operations = host.operations
            between = host.between_operations
            work = host.work
        else:  # the device has the time
            regions = timeline.regions(window)
            operations = dict(timeline.operations)
            between = {name: regions[name] for name in ("data", LAUNCH) if name in regions}
            work = regions
        layers = depth(run.unwrap_model())
        samples = self.timed["samples"] / self.timed["steps"]
        self.profile = StepProfile(
            device=run.device.type,
            precision={"no": "fp32"}.get(run.accelerator.mixed_precision, run.accelerator.mixed_precision),
            cores=platform_support.cores(),
            threads=torch.get_num_threads(),
            world_size=run.world_size,
            seconds=self.timed["seconds_a_step"],
            samples=samples,
            tokens=self.timed["tokens"] / self.timed["steps"],
            **{key: self.timed[key] for key in ("steps", "padded", "longest", "real", "reading", "page_faults")},
            regions=a_step(regions, steps),
            hooks=a_step(host.hooks, steps),
            operations=a_step(operations, steps),
            between_operations=a_step(between, steps),
            counts={event.key: event.count / steps for event in averages},
            flops=sum(event.flops or 0 for event in averages) / steps,
            peaks=peaks(run.device, ("fp32", "bf16") if run.device.type == "cpu" else tuple(DTYPES)),
            idle=None if timeline is None else timeline.idle_share,
            fault_seconds=fault_seconds(),
            reserved=self.reserved,
            retries=torch.cuda.memory_stats()["num_alloc_retries"] if run.device.type == "cuda" else 0,
            layers=layers,
            attention_calls=samples / run.world_size * layers,
            graph_breaks=graph_breaks(),
            recompiles=recompiles(),
            ranks=run.processes.all_gather_object(a_step(work, steps)),
        )


def a_step(seconds: Mapping[str, float], steps: int) -> dict[str, float]:
    """Seconds of a window of steps as those of one step, without zeros."""
    return {name: value / steps for name, value in seconds.items() if value}


def graph_breaks() -> list[dict[str, Any]]:
    """Where compilation broke the graph, with the line of the user's code."""
    places = []
    for cut in torch._dynamo.utils.graph_break_reasons:
        where = "?"
        if cut.user_stack:
            where = f"{cut.user_stack[-1].filename}:{cut.user_stack[-1].lineno}"
        places.append((where, str(cut.reason)))
    return _counted(places)


def recompiles() -> list[dict[str, Any]]:
    """Functions that were compiled again, and the reason."""
    places = []
    for metric in torch._dynamo.utils.get_compilation_metrics():
        if metric.recompile_reason:
            reason = metric.recompile_reason.partition(": ")[2]
            places.append((f"{metric.co_filename}:{metric.co_firstlineno}", reason))
    return _counted(places)


def _counted(places: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Count pairs of place and reason, with only the first line of each reason."""
    counts = Counter((where, reason.strip().partition("\n")[0]) for where, reason in places)
    return [{"where": where, "reason": reason, "count": count} for (where, reason), count in counts.items()]
