"""Compares the estimates of `fastloop plan --device-memory` with what real runs hold, save and send.

    python benchmarks/scale.py        # minutes on two cores; writes results/scale.json and a section of docs/scale.md

* Processes: the bytes of the live tensors just before the optimizer steps (the largest over the processes), and the
  bytes per process that the loopback interface carried in a step. benchmarks/strategies.py describes both, and provides
  the model. Nothing else may use loopback; run the script, for example, as
  ``unshare --net sh -c 'ip link set lo up; make scale'``.
* Activations: bytes that autograd saves in a real forward on a CPU.
* Large world sizes are simulated: one process runs the code of `fsdp` on torch's process group ``fake``, which
  exchanges nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:1])
os.environ.setdefault("OMP_NUM_THREADS", "1")

MIB = 2**20
STEPS = 21
"""Steps of a run: the wire is counted between steps 10 and 20."""


def processes() -> list[dict[str, Any]]:
    """One row for each strategy and number of processes."""
    import scale_runs

    from fastloop.testing import start

    rows = []
    for count in (1, 2, 4):
        estimates = scale_runs.predicted(count)
        for arm in scale_runs.ARMS:
            with tempfile.TemporaryDirectory() as folder:
                ended = start(count, scale_runs.measured, arm, STEPS, folder=Path(folder), limit=300)
            if any(process.code for process in ended):
                sys.exit(f"{arm} on {count} processes failed:\n{ended[0].output[-3000:]}")
            row = estimates[arm]
            held = sum(row[name] for name in ("weights", "gradients", "optimizer", "buckets_kept"))
            rows.append(ended[0].result | {"estimated": held, "estimated_wire": row["sent_bytes"]})
            print(rows[-1], flush=True)
    return rows


def activations() -> list[dict[str, Any]]:
    """One row for each model, precision and choice of activation checkpointing."""
    import scale_runs
    from checkpoint_helpers import write_rows

    from fastloop_tools.plan.memory.change import CHECKPOINTING
    from fastloop_tools.plan.memory.estimate import estimate

    rows = []
    write_rows(("A", "B"))
    for kind in scale_runs.MODELS:
        for precision in ("fp32", "bf16"):
            for checkpointing in (False, True):
                plugins = [{"amp": {"dtype": "bf16"}}] * (precision == "bf16") + [CHECKPOINTING] * checkpointing
                variants = estimate(scale_runs.tiny(kind, *plugins), 1).variants
                estimated = next(
                    row.saved for row in variants if row.name == "ddp" and row.checkpointing == checkpointing
                )
                real = scale_runs.saved_by_a_real_step(scale_runs.tiny(kind, *plugins))
                row = {"model": kind, "precision": precision, "checkpointing": checkpointing}
                rows.append(row | {"estimated": estimated, "measured": real})
                print(rows[-1], flush=True)
    return rows


def simulated() -> list[dict[str, Any]]:
    """One row for each part of ``fsdp`` at 64 and 1,024 processes."""
    import scale_runs

    from fastloop.testing import start
    from fastloop_tools.plan.memory.estimate import estimate

    rows = []
    for count in (64, 1024):
        (ended,) = start(1, scale_runs.sharding_of_torch, count)
        if ended.code:
            sys.exit(f"the simulation of {count} processes failed:\n{ended.output[-3000:]}")
        row = next(
            row
            for row in estimate(scale_runs.recipe(device="auto", batch_size=count), count).variants
            if row.name == "fsdp"
        )
        for part, size in ended.result.items():
            rows.append({"processes": count, "part": part, "estimated": getattr(row, part), "measured": size})
        print(rows[-4:], flush=True)
    return rows


def report(studies: dict[str, list[dict[str, Any]]]) -> str:
    """The results in markdown."""
    runs = {(row["arm"], row["processes"]): row for row in studies["processes"]}
    counts = sorted({count for _, count in runs})
    lines = [
        "Written by `make scale`: gloo on a CPU, fp32, the 6.8M parameters of [strategies.md](strategies.md).",
        "Sizes are MiB of a process, estimated/measured, by the number of processes.",
        "",
        f"| strategy | {' | '.join([*(f'held, {n}' for n in counts), *(f'wire, {n}' for n in counts if n > 1)])} |",
        f"|---|{'---:|' * (2 * len(counts) - 1)}",
    ]
    for arm in dict.fromkeys(arm for arm, _ in runs):
        rows = [runs[arm, count] for count in counts]
        held = [_cell(row["estimated"], row["stepping"]) for row in rows]
        wire = [_cell(row["estimated_wire"], row["wire"]) for row in rows if row["processes"] > 1]
        lines.append(f"| {' | '.join([arm, *held, *wire])} |")
    lines += ["", "Saved for backward, without and with activation checkpointing:", "", "| model | without | with |"]
    lines += ["|---|---:|---:|"]
    saved: dict[str, dict[bool, str]] = {}
    for row in studies["activations"]:
        cells = saved.setdefault(f"{row['model']}, {row['precision']}", {})
        cells[row["checkpointing"]] = _cell(row["estimated"], row["measured"])
    lines += [f"| {model} | {cells[False]} | {cells[True]} |" for model, cells in saved.items()]
    lines += ["", "`fsdp`, simulated: the plugin's code in one process, on torch's process group `fake`:", ""]
    parts: dict[int, dict[str, str]] = {}
    for row in studies["simulated"]:
        parts.setdefault(row["processes"], {})[row["part"]] = _cell(row["estimated"], row["measured"])
    head = list(next(iter(parts.values())))
    lines += [f"| processes | {' | '.join(head)} |", f"|{'---:|' * (1 + len(head))}"]
    lines += [f"| {count} | {' | '.join(cells.values())} |" for count, cells in parts.items()]
    return "\n".join(lines)


def _cell(estimated: float, measured: float) -> str:
    return f"{estimated / MIB:.2f}/{measured / MIB:.2f}"


def main() -> None:
    """Measure everything, and write the results."""
    from _measure import write_section

    start = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            studies = {"processes": processes(), "activations": activations(), "simulated": simulated()}
        finally:
            os.chdir(start)
    (HERE / "results" / "scale.json").write_text(json.dumps(studies, indent=1) + "\n")
    write_section("Estimated and measured", report(studies), HERE.parent / "docs" / "scale.md")


if __name__ == "__main__":
    main()
