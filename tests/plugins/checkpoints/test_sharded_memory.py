"""Host memory of a save and a resume of sharded weights: each process, also the main one, needs its share only."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, Trainer, hookimpl

pytestmark = pytest.mark.slow

WIDTH, PROCESSES = 768, 4
STRATEGIES: dict[str, list[Any]] = {
    "ddp, async-save": ["ddp", "async-save"],
    "fsdp, async-save": [{"fsdp": {"blocks": ["Linear"]}}, "async-save"],
}


def resident(name: str) -> int:
    """``VmRSS`` or ``VmHWM``, the peak, of this process in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


class PeakMemory(Plugin):
    """Measures by how much the resident memory grows, at most, while a checkpoint is saved or loaded."""

    name = "peak-memory"
    runs_before = ("deepspeed", "fsdp", "ddp", "async-save")

    def __init__(self) -> None:
        super().__init__()
        self.grown: dict[str, int] = {}
        self.before = 0

    def begin(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # free memory would hide growth
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.before = resident("VmRSS")

    def end(self, name: str) -> None:
        if self.before:
            self.grown[name] = resident("VmHWM") - self.before
        self.before = 0

    @hookimpl(trylast=True)
    def check_run(self, run: Any) -> None:
        if run.resume_point is not None:
            self.begin()

    @hookimpl
    def before_fit(self, run: Any) -> None:
        self.end("load")
        state = run.strategy.optimizer_state  # the first part of a save that holds tensors

        def begin(run: Any) -> Any:
            self.begin()
            return state(run)

        run.strategy.optimizer_state = begin

    @hookimpl
    def after_fit(self) -> None:
        self.end("save")


def save_and_load(plugins: list[Any]) -> dict[str, int]:
    """Train two steps and save after each; then resume. Returns the growth of memory in bytes."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, WIDTH), torch.randint(0, WIDTH, (64,)))
    grown: dict[str, int] = {}
    for steps in (2, 3):
        peak = PeakMemory()
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
        options = {
            "max_steps": steps,
            "epochs": 9,
            "batch_size": 8,
            "save_every": 2,
            "keep_checkpoints": 9,
            "lr": 1e-3,
            "device": "cpu",
        }
        given = [*plugins, {"log": False}, {"progress": False}, peak]
        Trainer(
            model, data, plugins=given, loss=nn.functional.cross_entropy, resume=steps == 3, output="run", **options
        ).fit()
        grown |= {name: value for name, value in peak.grown.items() if steps == 2 or name == "load"}
    return grown


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_of_a_save_and_a_resume(processes, tmp_path, name):
    ended = processes(PROCESSES, save_and_load, STRATEGIES[name], folder=tmp_path)
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    sizes = {str(path.relative_to(saved)): path.stat().st_size for path in saved.rglob("*.safetensors")}
    whole = sum(sizes.values())
    assert whole > 12 * WIDTH * WIDTH * 12
    shares = {what: [process.result[what] / whole for process in ended] for what in ("save", "load")}
    if name == "ddp, async-save":  # control: the main process copies the whole checkpoint
        assert shares["save"][0] > 0.9
        return
    assert all(size < 1.1 * whole / PROCESSES for size in sizes.values())
    assert len([size for size in sizes.values() if size > 0.9 * whole / PROCESSES]) == PROCESSES
    assert max(shares["save"]) < 0.8
    assert max(shares["load"]) < 0.8
