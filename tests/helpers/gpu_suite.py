"""Helpers for tests of the GPU suite in benchmarks/gpu: its commands in short form, and records of a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import forked

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
GPU = {
    "device": "NVIDIA H100",
    "driver": "580",
    "cuda": "13.0",
    "cudnn": 91900,
    "sources": "abc",
    "cpu": "x",
    "cores": 16,
    "versions": {},
}


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(name: str, results: Path, *options: str) -> list[dict[str, Any]]:
    """Run a command of the suite; its records."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    done = forked.run(
        str(BENCHMARKS / "gpu" / f"{name}.py"),
        "--tiny",
        "--results",
        str(results),
        *options,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read(results / f"gpu-{name}.jsonl")


def window(name: str, number: int, speed: float, **more: Any) -> dict[str, Any]:
    """A record of a window."""
    common = {
        "kind": "measure",
        "name": name,
        "round": number,
        "samples_per_second": speed,
        "seconds": 2.0,
        "flops": 6e12,
        "compile_seconds": 0.0,
    }
    return common | {"peak_bytes": 2**30, "computed": 200, "tokens": 150, "losses": [0.5]} | more
