"""How much Python does a step run?

The script counts function calls and bytecode instructions, which other load on the machine does not change.

The arms are those of ``overhead.py``: a model of one layer, a hand-written loop (raw), and fastloop with its default
plugins. Then one plugin at a time is added (+) or left out (-). The figures are the difference between a run of 2N
steps and a run of N steps, divided by N, so they exclude the cost of starting a run. They count the main thread only,
and no calls of C functions. The log reads memory once a second, which adds at most 30 instructions a step if steps are
slow.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import overhead
from _measure import cpu_model, source, version, write, write_section

DEFAULTS = ("log", "metric-check", "optimizer-check", "progress")
"""Plugins of every run, which are left out one at a time."""
ADDED = (
    "lr-scheduler",
    "ema",
    "nan-guard",
    "fused-optimizer",
    "sample-audit",
    "watchdog",
    "tensorboard",
    "device-prefetch",
)
"""Plugins that are added one at a time."""
Run = Callable[[int, str], float]


def count_calls(run: Run, steps: int) -> int:
    """Calls of Python functions in a run of ``steps`` steps."""
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        run(steps, "cpu")
    finally:
        sys.setprofile(None)
    return calls


def count_instructions(run: Run, steps: int) -> int:
    """Bytecode instructions in a run of ``steps`` steps."""
    instructions = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        instructions += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run(steps, "cpu")
    finally:
        sys.settrace(None)
    return instructions


def per_step(count: Callable[[Run, int], int], run: Run, steps: int) -> float:
    """The count of one step. ``steps`` is a multiple of ``overhead.LOG_EVERY``, so that log points are counted in
    proportion."""
    return (count(run, 2 * steps) - count(run, steps)) / steps


def arms() -> dict[str, Run]:
    """Name -> the run to count."""

    def fastloop(*plugins: Any) -> Run:
        return lambda steps, device: overhead.run_fastloop(steps, device, plugins)

    arms = {"raw": overhead.run_raw, "fastloop": fastloop()}
    arms |= {f"fastloop - {name}": fastloop({name: False}) for name in DEFAULTS}
    return arms | {f"fastloop + {name}": fastloop(name) for name in ADDED}


@contextmanager
def quiet() -> Any:
    """Send all output to /dev/null."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kept = (os.dup(1), os.dup(2))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        logging.disable(logging.NOTSET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="N of the N and 2N step runs (default 100)")
    parser.add_argument("--arms", nargs="+", help="arms to count; raw is always counted")
    parser.add_argument("--no-instructions", action="store_true", help="count calls only, which is quicker")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here; docs do not change")
    args = parser.parse_args()
    target = args.json and args.json.resolve()
    rows: dict[str, dict[str, float]] = {}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, run in arms().items():
            if args.arms is None or name in ("raw", *args.arms):
                # imports and caches; the check of the first 25 steps
                per_step(count_calls, run, 4 * overhead.LOG_EVERY)
                rows[name] = {"calls": per_step(count_calls, run, args.steps)}
                if not args.no_instructions:
                    rows[name]["instructions"] = per_step(count_instructions, run, args.steps)
    lines = [
        "| arm | Python calls a step | instructions a step |",
        "| --- | ---: | ---: |",
    ]
    for name, row in rows.items():
        cells = [f"{row[key]:.0f}" if key in row else "" for key in ("calls", "instructions")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    versions = {"python": sys.version.split()[0]} | {
        package: version(package) for package in ("torch", "accelerate", "fastloop-train")
    }
    shown = "\n".join(lines)
    results = {"cpu": cpu_model(), "versions": versions, "steps": args.steps, "rows": rows}
    print(shown)
    if target:
        target.write_text(json.dumps(results, indent=1))
    elif args.arms is None:
        write("step-calls", results)
        write_section("Python calls of a step", f"{source(__doc__, __file__)}\n\n{shown}")


if __name__ == "__main__":
    main()
