"""`fastloop plan --device-memory`: real processes hold and send the bytes that it estimates."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import scale_runs
from long_form import LONG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
COUNTS = json.loads((Path(__file__).parents[2] / "benchmarks/results/strategies.json").read_text())
STAGES = (0, 1, 2, 3) if LONG else (0, 2, 3)
"""Stages of DeepSpeed. Stage 1 has the gradients of stage 0 and the optimizer of stage 2."""
SHARDED = [pytest.param(f"zero-{stage}", 0.1, marks=needs_deepspeed) for stage in STAGES]
MORE = [1, 4] if LONG else []
"""Numbers of processes beside two, which every formula takes. `make scale` measures them, too."""


@pytest.mark.parametrize("count", [2, *MORE])
@pytest.mark.parametrize(("arm", "tolerance"), [("ddp", 0.05), ("fsdp", 0.05), *SHARDED])
def test_processes_hold_the_bytes_of_the_estimate(processes, tmp_path, arm, tolerance, count):
    ended = processes(count, scale_runs.measured, arm, folder=tmp_path)
    row = scale_runs.predicted(count)[arm]
    estimated = sum(row[name] for name in ("weights", "gradients", "optimizer", "buckets_kept"))
    assert estimated == pytest.approx(ended[0].result["stepping"], rel=tolerance)


@pytest.mark.parametrize("count", [2, 4])
def test_the_wire_is_that_which_the_loopback_interface_counted(count, monkeypatch, tmp_path):
    """benchmarks/strategies.py trained the same model, and counted the bytes with their headers."""
    monkeypatch.chdir(tmp_path)
    found = scale_runs.predicted(count)
    rows = [row for row in COUNTS["rows"] if row["processes"] == count and row["arm"] in scale_runs.ARMS]
    assert len(rows) == 6
    for row in rows:
        assert found[row["arm"]]["sent_bytes"] == pytest.approx(row["wire"], rel=0.05), row["arm"]
