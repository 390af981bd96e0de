"""Shared by the benchmarks: fresh processes, interleaved rounds, intervals, machine facts, and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
SAMPLE = 0.02
"""Seconds between two samples of a process that is watched."""


def run_suite(tests: Path, report: Path, *arguments: str, **variables: str) -> None:
    """Run tests and write pytest's report. Failures do not raise: the report contains them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "auto",
        "--dist",
        "loadscope",
        f"--junitxml={report}",
        *arguments,
        str(tests),
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"error: pytest ended with {done.returncode}")


def recorded_properties(case: Element) -> dict[str, str]:
    """The properties that a test recorded, from its ``testcase`` in a report."""
    return {item.get("name", ""): item.get("value", "") for item in case.iter("property")}


def rounds(arms: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """``(round, arm)`` with every second round backwards, A B B A, so that a drift of the machine hits all arms."""
    for number in range(repeats):
        order = arms if number % 2 == 0 else arms[::-1]
        for arm in order:
            yield number, arm


def spawn(
    arguments: Sequence[Any],
    environment: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
    watch: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Run a script in a fresh process. The last line that it prints is its result, in JSON.

    Args:
        environment: Variables to set, or with None to unset.
        timeout: Seconds after which the process is killed.
        watch: Called with the id of the process every ``SAMPLE`` seconds.

    Raises:
        SystemExit: The script failed; with its output.

    Returns:
        The result, with ``wall_seconds`` of the process and ``foreign_cores``: cores that other processes used
        meanwhile.
    """
    command = [sys.executable, *map(str, arguments)]
    merged = os.environ | dict(environment or {})
    busy = busy_seconds()
    own = sum(os.times()[:4])
    start = time.perf_counter()
    variables = {name: value for name, value in merged.items() if value is not None}
    with subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = read_output(process, timeout, watch)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        sys.exit(f"{' '.join(command[1:])} failed:\n{out[-1000:]}\n{err[-3000:]}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    wall = time.perf_counter() - start
    used = sum(os.times()[:4]) - own
    return result | {"wall_seconds": wall, "foreign_cores": foreign_cores(busy, used, wall)}


def read_output(
    process: subprocess.Popen[str], timeout: float | None, watch: Callable[[int], object] | None
) -> tuple[str, str]:
    """The output and the errors of a process that ends. See ``spawn``."""
    start = time.perf_counter()
    while True:
        left = None
        if timeout is not None:
            left = timeout - (time.perf_counter() - start)
            if left <= 0:
                sys.exit(f"{process.args!r} was ended after {timeout:.0f} seconds.")
        try:
            return process.communicate(timeout=left if watch is None else SAMPLE)
        except subprocess.TimeoutExpired:
            if watch is not None:
                watch(process.pid)


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Run Python with arguments, and measure the process: ``wall`` and ``processor`` seconds, and ``foreign_cores``.

    Raises:
        SystemExit: The process failed.
    """
    busy = busy_seconds()
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    used = usage.ru_utime + usage.ru_stime
    if status:
        sys.exit(f"error: {' '.join(arguments)} ended with status {status}")
    return {"wall": wall, "processor": used, "foreign_cores": foreign_cores(busy, used, wall)}


def arms_parser(document: str | None, arms: Sequence[str], steps: int) -> argparse.ArgumentParser:
    """The arguments of a script that trains a chat model by several arms, for ``run_arms``.

    Args:
        document: The docstring of the script.
        steps: Steps of a training by default.
    """
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the folder of a chat model")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds, each with its seed (default 3)")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of a training (default {steps})")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    parser.add_argument("--arm", choices=arms, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser


def run_arms(
    script: str, arms: Sequence[str], options: argparse.Namespace, describe: Callable[[Mapping[str, Any]], str]
) -> list[dict[str, dict[str, Any]]]:
    """Run each arm of each round in a fresh process of the script, which gets ``--arm`` and ``--seed``.

    Args:
        options: The arguments of ``arms_parser``.
        describe: The figure to print of a result.

    Returns:
        For each round: the name of an arm -> its result, as ``spawn`` returns it.
    """
    results: list[dict[str, dict[str, Any]]] = [{} for _ in range(options.repeats)]
    for number, arm in rounds(arms, options.repeats):
        command = ["-W", "ignore", script, "--arm", arm, "--model", options.model, "--steps", options.steps]
        row = spawn([*command, "--seed", number], {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
        results[number][arm] = row
        print(f"round {number + 1} {arm:32} {describe(row)}, {row['wall_seconds']:.0f} s", flush=True)
    return results


class Clock:
    """Times the steps of a training by their ends."""

    def __init__(self) -> None:
        self.ends = list[float]()

    def step(self) -> None:
        """A step has reached the same place as the step before."""
        self.ends.append(time.perf_counter())

    def seconds(self, warmup: int) -> float:
        """Mean seconds of a step, without the first ``warmup`` steps if there are more."""
        # with a warm-up of 2 steps, the end of step 2, at place 1, begins the measured time
        first = min(warmup, len(self.ends) - 1) - 1
        measured = self.ends[first:]
        return (measured[-1] - measured[0]) / (len(measured) - 1)


def foreign_cores(busy: float | None, used: float, wall: float) -> float | None:
    """Cores that other processes used in the last ``wall`` seconds, in which this one and its children used ``used``
    CPU seconds. ``busy``: ``busy_seconds()`` before them."""
    after = busy_seconds()
    return None if busy is None or after is None else max(0.0, (after - busy - used) / wall)


def busy_seconds() -> float | None:
    """CPU seconds that all processes of this machine have used so far, stolen time included."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def every_run(results: Sequence[Mapping[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The figures of all arms of all rounds, for ``load``."""
    runs: list[dict[str, Any]] = []
    for of_round in results:
        runs += of_round.values()
    return runs


def load(results: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about the load of other processes during the given results."""
    foreign = [row["foreign_cores"] for row in results if row["foreign_cores"] is not None]
    if not foreign:
        return "The load by other processes was not measured."
    return (
        f"Other processes used {statistics.mean(foreign):.2f} of {os.cpu_count()} cores on average, "
        f"{max(foreign):.2f} at most."
    )


def interval(values: Sequence[float], draws: int = 5000) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median."""
    generator = random.Random(0)
    medians = []
    for _ in range(draws):
        drawn = generator.choices(values, k=len(values))
        medians.append(statistics.median(drawn))
    medians.sort()
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median of paired ratios with its interval."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "interval95": interval(ratios), "ratios": ratios}


def show_ratio(measured: Mapping[str, Any]) -> str:
    """A result of ``ratio`` as text for tables."""
    low, high = measured["interval95"]
    return f"{measured['median']:.2f} ({low:.2f} to {high:.2f})"


def caution(count: int) -> str:
    """A remark on intervals of this number of rounds."""
    return f"Intervals are ranges of {count} rounds." if count < 5 else ""


def machine(*packages: str) -> dict[str, Any]:
    """Facts about the machine: processor, cores, versions of Python and packages, and the commit."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        versions[package] = version(package)
    return {"cpu": cpu_model(), "cores": os.cpu_count(), "versions": versions, "commit": commit()}


def product_speeds() -> dict[str, float]:
    """Floating-point operations a second of matrix products on the CPU, by dtype.

    Two virtual machines of one name differ by a factor of two in bf16. Ratios of arms in fp32 and bf16 depend on it.
    """
    import torch

    from fastloop_plugins.observe._machine_speed import peaks

    return peaks(torch.device("cpu"), ("fp32", "bf16"))


def commit() -> str | None:
    """The commit of the checkout; None: there is no git, or no repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def show_machine(facts: Mapping[str, Any]) -> str:
    """The facts as a sentence. The results have all versions."""
    versions = []
    for name, installed in facts["versions"].items():
        if name not in ("python", "fastloop-train"):
            versions.append(f"{name} {installed or 'not installed'}")
    device = facts.get("device", facts["cpu"])
    shown = f"{device}, {facts['cores']} cores; {', '.join(versions)}."
    if "products" in facts:
        speeds = [f"{speed / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, speed in facts["products"].items()]
        shown += f" Matrix products reach {' and '.join(speeds)}."
    return shown


def cpu_model() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def version(package: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory(kind: str) -> int:
    """Bytes of this process, from Linux: ``VmRSS`` is the memory resident now, ``VmHWM`` its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == kind:
            return 1024 * int(size.split()[0])  # "VmRSS:   1234 kB"
    raise ValueError(f"/proc/self/status has no {kind}")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], text_columns: int = 1) -> str:
    """A markdown table; the first columns are text, the others numbers."""
    marks = ["---" if index < text_columns else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, marks, *rows])


def write(name: str, results: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write the raw results to ``benchmarks/results/NAME.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def source(document: str | None, script: str) -> str:
    """The first line of a script's docstring, and the script's name: how a section begins."""
    first = (document or "").strip().partition("\n")[0]
    return f"{first} Script: `benchmarks/{Path(script).name}`."


def write_section(title: str, text: str, page: Path = PAGE) -> None:
    """Write a section of docs/benchmarks.md. Replaces a section with the same title."""
    intro = (
        "The scripts in `benchmarks/` write this page, and their docstrings describe the method. "
        "`benchmarks/results/` has the raw figures."
    )
    before = page.read_text() if page.exists() else f"# Benchmarks\n\n{intro}\n"
    section = f"## {title}\n\n{text.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    after, replaced = pattern.subn(lambda _: section + "\n", before)
    if not replaced:
        after = f"{before.rstrip()}\n\n{section}"
    page.write_text(after.rstrip() + "\n")
