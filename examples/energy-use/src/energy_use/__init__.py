"""Measures the energy and processor time of a run: joules if the machine has counters for them, and the GPU's use.

    plugins:
      - energy-use: {every: 20}

The processor's joules are those of the full machine, from Linux's powercap (RAPL), which only root may read on most
machines. A GPU's joules come from NVML: ``pip install 'energy-use[nvidia]'``. The measurement covers the first step to
the last, with evaluations and saving in between; with several processes, it covers the main process. The results are in
the summary as ``energy-use``.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop import Plugin, hookimpl, option

if TYPE_CHECKING:
    import torch
    from fastloop import Run

logger = logging.getLogger("fastloop")

POWERCAP = Path("/sys/class/powercap")


class EnergyUse(Plugin):
    """Measures joules and processor time, for the summary and the log."""

    name = "energy-use"
    numerics = "bitwise"
    read_only: ClassVar[bool] = True

    every: int = option(
        "Steps between reads of the counters, some of which wrap around within minutes.", default=20, ge=1
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.found: dict[str, Any] | None = None

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self.rapl = Rapl()
        self.gpu = Gpu(run.device) if run.device.type == "cuda" else None
        self.cpu_seconds = cpu_seconds()
        self.started = perf_counter()

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step % self.every == 0:
            self.read_counters()

    @hookimpl
    def after_fit(self, run: Run) -> None:
        self.read_counters()
        seconds = perf_counter() - self.started
        spent = cpu_seconds() - self.cpu_seconds
        joules = {"processor": self.rapl.joules} if self.rapl.zones else {}
        if self.gpu is not None and self.gpu.joules is not None:
            joules["gpu"] = self.gpu.joules
        self.found = {"seconds": seconds, "cpu_seconds": spent, "cores_busy": spent / seconds, "joules": joules}
        if self.gpu is not None:
            self.found["gpu_busy"] = self.gpu.busy
        counted = ", ".join(f"{value:.0f} J by the {name}" for name, value in joules.items())
        counted = counted or f"no energy counter can be read here ({self.rapl.why})"
        self.log.info("%.1f s, %.1f CPU seconds, %s", seconds, spent, counted)

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["energy-use"] = self.found

    def read_counters(self) -> None:
        """Read the counters that wrap around."""
        self.rapl.update()
        if self.gpu is not None:
            self.gpu.update()


class Rapl:
    """The energy counters of the processor packages and their memory.

    Attributes:
        zones: Folder -> last value of its counter, in microjoules.
        joules: Sum of the energy used so far.
        why: Why there are no zones.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.joules = 0.0
        self.why = f"{folder} has none"
        self.zones: dict[Path, int] = {}
        for zone in sorted(folder.glob("intel-rapl:*")):  # AMD processors use this name too
            name = read(zone / "name")
            if name.startswith("package") or name == "dram":  # the other zones are parts of a package
                try:
                    self.zones[zone] = int(read(zone / "energy_uj"))
                except PermissionError:
                    self.why = f"{zone / 'energy_uj'} may not be read by this user"

    def update(self) -> None:
        """Add the energy used since the last call. A counter that wraps around restarts at 0."""
        for zone, before in self.zones.items():
            now = int(read(zone / "energy_uj"))
            used = now - before if now >= before else now + int(read(zone / "max_energy_range_uj")) - before
            self.joules += used / 1e6
            self.zones[zone] = now


class Gpu:
    """NVML's counters of one GPU.

    Attributes:
        joules: Energy used so far; None: there is no counter.
        busy: Mean GPU utilization over all reads, 0 to 1; None: unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = None
        self.busy: float | None = None
        self.reads = 0
        try:
            import pynvml
        except ImportError:
            logger.warning(
                "energy-use: the GPU is not measured: pynvml is not installed. "
                "Install it: pip install 'energy-use[nvidia]'"
            )
            return
        import torch

        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self.start = pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)  # millijoules
        except pynvml.NVMLError as error:  # a partition of a GPU, or an old GPU, has no counter
            logger.warning("energy-use: the GPU is not measured: %s", error)
            return
        self.joules = 0.0

    def update(self) -> None:
        """Read energy and utilization."""
        if self.joules is None:
            return
        with suppress(self.nvml.NVMLError):
            self.joules = (self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) - self.start) / 1e3
            share = self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
            self.reads += 1
            self.busy = (self.busy or 0.0) + (share - (self.busy or 0.0)) / self.reads


def read(file: Path) -> str:
    """The text of a counter file."""
    return file.read_text(encoding="ascii").strip()


def cpu_seconds() -> float:
    """Processor seconds of this process and its children, running or ended, such as data-loader workers."""
    import psutil

    this = psutil.Process()
    spent = this.cpu_times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    for process in this.children(recursive=True):
        with suppress(psutil.Error):  # the child has just ended
            total += sum(process.cpu_times()[:2])
    return float(total)
