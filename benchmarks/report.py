"""How long does `fastloop report` take for a long run?

    python benchmarks/report.py                  # a million log points, about 30 seconds
    python benchmarks/report.py --steps 100000

The log has seven values per point and an evaluation every 1000 points. Each sample is a fresh process. Processor time
is user and system time of the process. The figures are the median over the rounds, with their range.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure `fastloop report`.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="Log points of the run.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        folder.mkdir()
        (folder / "recipe.yaml").write_text("train: {}\n")
        with (folder / "metrics.jsonl").open("w") as file:
            file.writelines(lines(options.steps))
        megabytes = (folder / "metrics.jsonl").stat().st_size / 1e6
        print(f"{options.steps:,} log points, {megabytes:,.0f} MB")
        walls = []
        processor = []
        for _ in range(options.rounds):
            started = time.perf_counter()
            before = os.times()
            subprocess.run([sys.executable, "-m", "fastloop", "report", str(folder)], cwd=scratch, check=True)
            walls.append(time.perf_counter() - started)
            after = os.times()
            user = after.children_user - before.children_user
            system = after.children_system - before.children_system
            processor.append(user + system)
    for name, values in (("wall time", walls), ("processor time", processor)):
        print(f"{name}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")


def lines(steps: int) -> Iterator[str]:
    """The lines of a log, as the plugin `log` writes them."""
    draw = random.Random(0)
    for step in range(1, steps + 1):
        point = {
            "step": step,
            "epoch": 1 + step // 10_000,
            "loss": 2 * math.exp(-step / 2e5) + draw.random() / 10,
            "lr": 1e-3 * (1 - step / steps),
            "grad_norm": None if step % 999 == 0 else draw.random(),
            "samples_per_second": 800 + draw.random(),
            "tokens_per_second": 9000 + draw.random(),
            "memory_bytes": 1234567,
        }
        yield json.dumps(point) + "\n"
        if step % 1000 == 0:
            yield json.dumps({"step": step, "epoch": 1, "split": "validation", "loss": draw.random()}) + "\n"


if __name__ == "__main__":
    main()
