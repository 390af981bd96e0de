"""Measurement windows: an arm measures one epoch, or a number of steps, at a time, in the way that a command requests.

``warmup`` and ``measure`` time a window, with the device synchronized at both ends. ``syncs`` counts how often the host
waits for the device in some steps, and ``profile`` records their kernels. Both reply as soon as they have observed
these steps, and the next command may begin in the same window.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from _measure import memory

SKIPPED = 2
"""Steps that a probe skips at the start of its window."""
PROBED = 20
"""Steps that a probe observes."""
PROBES = ("syncs", "profile")
ATTENTION = re.compile(r"flash|fmha|mha_|sdpa|attention|attn", re.IGNORECASE)
"""Matches names of attention kernels: FlashAttention, cuDNN, CUTLASS, and torch's operations on a CPU."""


class Probe(Protocol):
    """Observes a few steps."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def found(self, steps: int) -> dict[str, Any]:
        """The result, after ``steps`` observed steps."""
        ...


class Syncs:
    """Counts operations for which the host waits for a CUDA device, as ``torch.cuda.set_sync_debug_mode`` reports them.

    Explicit calls of ``synchronize``, of a device, stream or event, are not counted.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.places = Counter[str]()

    def start(self) -> None:
        import torch

        self.catcher = warnings.catch_warnings()
        self.catcher.__enter__()
        warnings.filterwarnings("always", message=".*synchronizing")
        self.before = warnings.showwarning
        warnings.showwarning = self.show
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def show(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        """Replacement of ``warnings.showwarning``."""
        if "synchronizing" not in str(message):
            self.before(message, *rest, **more)
            return
        frames = [
            frame
            for frame in traceback.extract_stack()[:-1]
            if "/torch/" not in frame.filename and frame.name != "_showwarnmsg"
        ]
        if not frames:
            self.places["?"] += 1
            return
        caller = frames[-1]
        if caller.filename == __file__:
            return  # the probe itself waits when it stops
        file = "/".join(Path(caller.filename).parts[-2:])
        self.places[f"{file}:{caller.lineno}"] += 1

    def stop(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.catcher.__exit__(None, None, None)

    def found(self, steps: int) -> dict[str, Any]:
        if self.device != "cuda":
            return {"syncs_per_step": None, "sync_places": {}}
        return {"syncs_per_step": sum(self.places.values()) / steps, "sync_places": dict(self.places.most_common(8))}


class Kernels:
    """Records the kernels of a CUDA device; on a CPU the operations.

    Args:
        trace: A file for the trace, compressed by gzip, which https://ui.perfetto.dev shows.
    """

    def __init__(self, device: str, trace: str | None = None) -> None:
        self.device = device
        self.trace = trace

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self.device == "cuda":
            torch.cuda.synchronize()
        observed = ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU
        self.profiler = profile(activities=[observed])
        self.profiler.start()
        self.started = time.perf_counter()

    def stop(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.started
        self.profiler.stop()

    def found(self, steps: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(file))
            text = file.read_bytes()
        if self.trace is not None:
            Path(self.trace).write_bytes(gzip.compress(text))
        events = json.loads(text)["traceEvents"]
        category = "kernel" if self.device == "cuda" else "cpu_op"
        return summarize_kernels(events, steps, self.seconds, category)


def summarize_kernels(events: list[dict[str, Any]], steps: int, seconds: float, category: str) -> dict[str, Any]:
    """Sum the events of a trace over ``steps`` steps that took ``seconds``.

    Returns:
        ``kernels``: name -> milliseconds in a step, for the longest ones; ``attention``: the same for attention
            kernels;
        ``kernels_per_step``; ``busy``: share of the time in which at least one kernel ran. Both are None if the trace
            has no kernels, as where the driver does not permit profiling.
    """
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") == category]
    if not kernels:
        return {"kernels_per_step": None, "busy": None, "attention": {}, "kernels": {}}
    spent = Counter[str]()
    for event in kernels:
        spent[event["name"][:120]] += event["dur"] / 1e3 / steps
    busy = 0.0
    end = 0.0
    for event in sorted(kernels, key=lambda event: float(event["ts"])):
        first = float(event["ts"])
        last = first + event["dur"]
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    attention = Counter({name: value for name, value in spent.items() if ATTENTION.search(name)})
    return {
        "kernels_per_step": len(kernels) / steps,
        "busy": busy / 1e6 / seconds,
        "attention": dict(attention.most_common(4)),
        "kernels": dict(spent.most_common(10)),
    }


def compile_seconds() -> float:
    """Seconds that this process has spent compiling, by torch's counters."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo import utils

    return float(utils.calculate_time_spent().get("total_wall_time", 0.0))


class Windows:
    """Callbacks of an arm: ``begin`` and ``end`` around each epoch, ``batch`` before each forward, ``step`` after each
    step.

    Args:
        device: ``cpu`` or ``cuda``.
        next_command: Returns the command for the next epoch; may wait for it.
        report: Called with the result of each epoch.
        lengths: Tokens of each sample of an epoch, to count floating-point operations.
        trace: A file for the trace of the command ``profile``.
    """

    def __init__(
        self,
        device: str,
        next_command: Callable[[], str],
        report: Callable[[dict[str, Any]], None],
        lengths: Any = None,
        trace: str | None = None,
    ) -> None:
        self.device = device
        self.next_command = next_command
        self.report = report
        self.lengths = lengths
        self.trace = trace
        self.command: str | None = None  # None after its reply, until the next window begins
        self.pending: str | None = None  # read inside a window, and carried out in the next one
        self.trained_steps = 0
        self.losses: list[Any] = []

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def begin(self, validate: Callable[[], float] | None = None) -> None:
        """Wait for the next command, unless it was read inside the window before.

        Args:
            validate: Computes the validation loss, which the command ``validate`` requests before another window.
        """
        command = self.pending or self.next_command()
        self.pending = None
        while command == "validate" and validate is not None:
            self.report({"command": command, "validation_loss": validate(), "trained_steps": self.trained_steps})
            command = self.next_command()
        self._start(command)

    def _start(self, command: str) -> None:
        """Carry out a command from the next step on."""
        import torch

        self.command = command
        self.rows = 0
        self.computed = 0
        self.losses = []
        self.compiled = compile_seconds()
        self.probe: Probe | None = None
        if command == "syncs":
            self.probe = Syncs(self.device)
        elif command == "profile":
            self.probe = Kernels(self.device, self.trace)
        self.probing = False
        self.synchronize()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.started = time.perf_counter()

    def batch(self, inputs: Any, rows: int | None = None) -> None:
        self.rows += rows or inputs["input_ids"].shape[0]
        self.computed += inputs["input_ids"].numel()

    def step(self, loss: Any) -> None:
        self.trained_steps += 1
        if self.command is None:
            return
        self.losses.append(loss.detach())
        if self.probe is None:
            return
        if len(self.losses) == SKIPPED:
            self.probe.start()
            self.probing = True
        elif len(self.losses) == SKIPPED + PROBED:
            self._reply_to_probe(self.probe)
            command = self.next_command()
            if command in PROBES:
                self._start(command)
            else:
                self.pending = command

    def _reply_to_probe(self, probe: Probe) -> None:
        """Reply with the result of a probe, which is empty if the window has no more steps than it skips."""
        result: dict[str, Any] = {"command": self.command, "seconds": time.perf_counter() - self.started}
        probed = len(self.losses) - SKIPPED
        if self.probing:
            probe.stop()
            self.probing = False
        if probed > 0:
            result |= {"steps": probed, **probe.found(probed)}
        self.command = None
        self.report(result)

    def end(self, model: Any) -> None:
        """Reply, unless a probe has replied in this window already."""
        import torch

        if self.command is None:
            return
        if self.probe is not None:
            self._reply_to_probe(self.probe)
            return
        self.synchronize()
        seconds = time.perf_counter() - self.started
        result = {
            "command": self.command,
            "seconds": seconds,
            "samples": self.rows,
            "samples_per_second": self.rows / seconds,
            "computed": self.computed,
            "steps": len(self.losses),
            "losses": [round(float(loss), 4) for loss in self.losses],
            "train_mode": all(part.training for part in model.modules()),
            "compile_seconds": compile_seconds() - self.compiled,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else memory("VmHWM"),
        }
        if self.lengths is not None:
            result["flops"] = training_flops(model, self.lengths)
        self.command = None
        self.report(result)


def training_flops(model: Any, lengths: Any) -> float:
    """Floating-point operations of one epoch over samples of these lengths in tokens, without padding.

    A forward and backward pass takes 6 operations for each weight and token (Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1). Attention takes 12 times the width for each pair of tokens and each layer. Embeddings, norms and the
    classifier are not counted.
    """
    from torch import nn

    weights = sum(
        part.weight.numel()
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and ".layer." in f".{name}"
    )
    tokens = float(lengths.sum())
    pairs = float((lengths.astype(float) ** 2).sum())  # of tokens of one text
    width = model.config.hidden_size
    layers = model.config.num_hidden_layers
    flops: float = 6.0 * weights * tokens + 12.0 * layers * width * pairs
    return flops
