"""The plan for 15 minutes on a GPU: the commands in the order of the knowledge that they give, each with its seconds.

    bash benchmarks/gpu/all.sh plan --seconds 580
    bash benchmarks/gpu/all.sh plan --seconds 190 --start plugin-tests

The plan ends within ``--seconds``. Each command gets its own seconds and those that earlier ones did not use, or those
that are left if they are fewer. With fewer than it needs for a result, it is recorded as ``skipped``, and a later
command may still fit. ``--start`` names the part that a second call begins with. On less than 120 GiB of memory, parts
are shorter or left out.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass, replace
from pathlib import Path

from _suite import ENDING_SECONDS, FOLDER, Budget, Records, options, run_limited

LARGE_BYTES = 120 * 2**30
"""Memory of a GPU from which all parts run: that of an H200, and not of an H100 with 80 GB."""
CALL_SECONDS = 580.0
"""Seconds of one call, of at most ten minutes."""
SETUP_SECONDS = 12.0
"""Seconds of ``setup.sh``."""
REPORT_SECONDS = 4.0
"""Seconds of a command's part that are reserved for the end of its workers and its tables."""
TINY_SECONDS = 2.0
"""With ``--tiny``, a part has its seconds times this, since a busy CPU compiles slowly."""
TINY_LEAST = 0.4
"""With ``--tiny``, a part begins if its least seconds times this are left."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command of the plan.

    Attributes:
        name: For ``--start``.
        script: The file of the command, without its suffix.
        records: The file of its records, without its suffix.
        options: The options on a large GPU.
        small_options: The options on a GPU with less memory; None: the part is left out there.
        seconds: Seconds that it takes on an H200.
        least: Seconds without which it gives no result.
    """

    name: str
    script: str
    records: str
    options: tuple[str, ...] = ()
    small_options: tuple[str, ...] | None = ()
    seconds: float
    least: float


VARIANTS = ("--variants", "baseline", "packing-graphs", "step-graph", "batch-48", "--rounds", "2", "--no-jobs")
PEERS = ("--arms", "naive", "hf-trainer-compile", "fastloop", "--rounds", "2", "--no-overhead")
PLAN = (
    Part(
        name="ablation",
        script="ablation",
        records="gpu-ablation",
        options=VARIANTS,
        small_options=VARIANTS,
        seconds=140,
        least=105,
    ),
    Part(
        name="lm",
        script="lm",
        records="gpu-lm",
        options=("--arms", "plain", "graphs", "muon", "--rounds", "2"),
        small_options=("--arms", "plain", "graphs", "--rounds", "2"),
        seconds=140,
        least=80,
    ),
    Part(
        name="job",
        script="job",
        records="gpu-job",
        options=("--caches", "cold", "warm", "--seeds"),
        small_options=("--caches", "cold", "warm", "--seeds"),
        seconds=210,
        least=145,
    ),
    Part(name="tests", script="tests", records="gpu-tests", seconds=75, least=45),
    Part(
        name="plugin-tests",
        script="tests",
        records="gpu-tests",
        options=("--plugins",),
        small_options=("--plugins",),
        seconds=180,
        least=60,
    ),
    Part(name="peers", script="peers", records="gpu-peers", options=PEERS, small_options=None, seconds=115, least=95),
    Part(
        name="seeds",
        script="job",
        records="gpu-job",
        options=("--caches", "--seeds", "1", "2"),
        small_options=("--caches", "--seeds", "1", "2"),
        seconds=160,
        least=90,
    ),
)
"""In the order of knowledge. The first four take one call of ten minutes, and the others a second call."""


def shrunk(part: Part) -> Part:
    """A part for ``--tiny``."""
    return replace(part, seconds=TINY_SECONDS * part.seconds, least=TINY_LEAST * part.least)


def gpu_memory() -> int | None:
    """Bytes of memory of the first GPU, by nvidia-smi; None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return None
    first = done.stdout.partition("\n")[0].strip()
    return int(first) * 2**20 if first.isdecimal() else None


def options_of(part: Part, memory_bytes: int | None) -> tuple[str, ...] | None:
    """The options of a part on a GPU with this memory; None: it is left out."""
    small = memory_bytes is not None and memory_bytes < LARGE_BYTES
    return part.small_options if small else part.options


def skip(part: Part, why: str, results: Path) -> None:
    """Record that a part was skipped, as a run of its own."""
    records = Records(results / f"{part.records}.jsonl")
    records.write({"kind": "facts", "command": part.name})
    records.add("skipped", why, name=part.name, why=why)


def seconds_of(part: Part, planned_end: float, budget: Budget) -> float:
    """Seconds of a part: its own, or until its end in the plan if that is later, within the budget.

    Args:
        planned_end: Seconds from the start of the plan at which the part ends, if each part takes its own seconds.
    """
    passed = budget.seconds - budget.left()
    return min(max(part.seconds, planned_end - passed), budget.left())


def run_part(part: Part, given: tuple[str, ...], seconds: float, tiny: bool, results: Path, budget: Budget) -> bool:
    """Run a part within its seconds; returns whether it worked, or was cut."""
    command = [sys.executable, str(FOLDER / f"{part.script}.py"), *given, "--results", str(results)]
    command += ["--seconds", f"{seconds - REPORT_SECONDS - ENDING_SECONDS:.0f}", *(["--tiny"] if tiny else [])]
    print(f"== {part.name}: {seconds:.0f} s of {budget.left():.0f} s that are left", flush=True)
    status = run_limited(command, None, seconds - ENDING_SECONDS, {})
    if status is None:
        records = Records(results / f"{part.records}.jsonl")
        records.cut(part.name, "the plan", Budget(seconds))
    return status in (None, 0)


def main() -> None:
    """Run the plan."""

    def prepare(parser: ArgumentParser) -> None:
        parser.set_defaults(seconds=None)
        parser.add_argument("--start", choices=[part.name for part in PLAN], help="the part to begin with")
        parser.add_argument("--used", type=float, default=0.0, help="seconds that have passed already (default 0)")

    settings = options(__doc__, prepare)
    names = [part.name for part in PLAN]
    parts = PLAN[names.index(settings.start) if settings.start else 0 :]
    if settings.tiny:
        parts = tuple(shrunk(part) for part in parts)
    whole = sum(part.seconds for part in parts) + SETUP_SECONDS
    budget = Budget(settings.seconds or (whole if settings.tiny else CALL_SECONDS), used=settings.used)
    memory = gpu_memory()
    worked = True
    planned_end = SETUP_SECONDS
    for part in parts:
        planned_end += part.seconds
        given = options_of(part, memory)
        if given is None:
            skip(part, "the GPU has less than 120 GiB of memory", settings.results)
        elif not budget.fits(part.least):
            why = f"at least {part.least:.0f} s are needed, {max(budget.left(), 0):.0f} are left"
            skip(part, why, settings.results)
        else:
            seconds = seconds_of(part, planned_end, budget)
            worked = run_part(part, given, seconds, settings.tiny, settings.results, budget) and worked
    print(f"\n{settings.results}: {budget.seconds - budget.left():.0f} s", flush=True)
    sys.exit(not worked)


if __name__ == "__main__":
    main()
