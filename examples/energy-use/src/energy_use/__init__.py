"""Counts what a run takes: joules where the machine counts them, processor time everywhere, and how busy the GPU was.

    plugins:
      - energy-use: {every: 20}

The processor's joules are those of the whole machine, from Linux's powercap (RAPL), which on most machines root alone may read. A GPU's
come from NVML: ``pip install 'energy-use[nvidia]'``. Counted is from the first step to the last, evaluations and saving in between
included; with several processes, for the main one. The summary has it as ``energy-use``.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastloop import Plugin, hookimpl, option

if TYPE_CHECKING:
    import torch
    from fastloop import Run

logger = logging.getLogger("fastloop")

POWERCAP = Path("/sys/class/powercap")


class EnergyUse(Plugin):
    """Energy and processor time, in the summary and the log."""

    name = "energy-use"
    numerics = "bitwise"
    read_only: ClassVar[bool] = True
    description = "counts joules and processor time"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        every: Annotated[int, option("Steps between looks at the counters, some of which wrap around within minutes.", ge=1)] = 20

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.found: dict[str, Any] | None = None

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self.rapl = Rapl()
        self.gpu = Gpu(run.device) if run.device.type == "cuda" else None
        self.cpu_seconds, self.started = cpu_seconds(), perf_counter()

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step % self.config.every == 0:
            self.look()

    @hookimpl
    def after_fit(self, run: Run) -> None:
        self.look()
        seconds, spent = perf_counter() - self.started, cpu_seconds() - self.cpu_seconds
        joules = {"processor": self.rapl.joules} if self.rapl.zones else {}
        if self.gpu is not None and self.gpu.joules is not None:
            joules["gpu"] = self.gpu.joules
        self.found = {"seconds": seconds, "cpu_seconds": spent, "cores_busy": spent / seconds, "joules": joules}
        if self.gpu is not None:
            self.found["gpu_busy"] = self.gpu.busy
        counted = ", ".join(f"{value:.0f} J by the {name}" for name, value in joules.items())
        counted = counted or f"no energy counter can be read here ({self.rapl.why})"
        logger.info("energy-use: %.1f s, %.1f CPU seconds, %s", seconds, spent, counted)

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["energy-use"] = self.found

    def look(self) -> None:
        """Read what must be read now and then."""
        self.rapl.look()
        if self.gpu is not None:
            self.gpu.look()


class Rapl:
    """The energy counters of the processor packages and of the memory beside them.

    Attributes:
        zones: Folder -> its counter when it was last read, in microjoules.
        joules: What they add up to so far.
        why: Why there are no zones.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.joules, self.why = 0.0, f"{folder} has none"
        self.zones: dict[Path, int] = {}
        for zone in sorted(folder.glob("intel-rapl:*")):  # AMD's processors have them under this name too
            name = read(zone / "name")
            if name.startswith("package") or name == "dram":  # the other zones are parts of a package
                try:
                    self.zones[zone] = int(read(zone / "energy_uj"))
                except PermissionError:
                    self.why = f"{zone / 'energy_uj'} may not be read by this user"

    def look(self) -> None:
        """Add what was used since the last look. A counter that has wrapped around began anew at 0."""
        for zone, before in self.zones.items():
            now = int(read(zone / "energy_uj"))
            used = now - before if now >= before else now + int(read(zone / "max_energy_range_uj")) - before
            self.joules += used / 1e6
            self.zones[zone] = now


class Gpu:
    """NVML's counters of one GPU.

    Attributes:
        joules: Used so far; None: not counted here.
        busy: Mean share of the time in which a kernel ran, over the looks; None: not known here.
    """

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = None
        self.busy: float | None = None
        self.profile_steps = 0
        try:
            import pynvml
        except ImportError:
            logger.warning("energy-use: the GPU is not looked at: pynvml is not installed. Install it: pip install 'energy-use[nvidia]'")
            return
        import torch

        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self.start = pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)  # millijoules
        except pynvml.NVMLError as error:  # a part of a GPU, or one too old, has no counter
            logger.warning("energy-use: the GPU is not looked at: %s", error)
            return
        self.joules = 0.0

    def look(self) -> None:
        """Read both."""
        if self.joules is None:
            return
        with suppress(self.nvml.NVMLError):
            self.joules = (self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) - self.start) / 1e3
            share = self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
            self.profile_steps += 1
            self.busy = (self.busy or 0.0) + (share - (self.busy or 0.0)) / self.profile_steps


def read(file: Path) -> str:
    """A counter's text."""
    return file.read_text(encoding="ascii").strip()


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started, such as workers that load data: ended ones, and running ones."""
    import psutil

    this = psutil.Process()
    spent = this.cpu_times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    for process in this.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            total += sum(process.cpu_times()[:2])
    return float(total)
