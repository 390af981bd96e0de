"""Commands 1 and 6: the tests that need a GPU, and the tests of the plugins on the GPU.

    bash benchmarks/gpu/all.sh tests
    bash benchmarks/gpu/all.sh plugin-tests

Each file of tests runs in its own process, a few at a time: an error that breaks a device's context breaks one file.
The longest files are divided among several processes, and begin first.
The first command runs the tests marked ``gpu``. The second one runs the files of ``tests/plugins``, except those of
strategies, without their slow tests: ``tiny_run`` and the conformance suite train on the device there. Each test that
did not pass is a record, and each file with its counts. A test may take ``--timeout`` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from _measure import ROOT
from _suite import (
    ENDING_SECONDS,
    Budget,
    Records,
    command_budget,
    facts,
    find_device,
    options,
    run_limited,
    scratch,
)

START_SECONDS = 20.0
"""Seconds that must be left for a process to begin."""
FILE_SECONDS = 240.0
"""Seconds that a file of tests may take."""
TINY = ("test_small_speedups.py", "test_device_prefetch.py")
"""Files of ``tests/plugins`` for ``--tiny``."""
PROCESSES = {"test_gpu_runs.py": 3, "test_gpu_suite.py": 1, "test_packing_varlen.py": 1}
"""The longest files of tests that need a GPU, and the number of processes that share one. The tests of the first take
160 s on an H200, and the longest 50 s."""
LAST = {"test_conformance.py": 4, "test_all_plugins.py": 1}
"""Files of ``tests/plugins`` that take longest and mostly need no GPU, and their numbers of processes; they run
last."""


@dataclass(frozen=True)
class Part:
    """The tests of a file that one process runs: of ``[a, b, c, d, e]``, part 2 of 3 has b and e.

    Attributes:
        marks: pytest's option ``-m``.
        number: From 1 to ``total``.
    """

    file: Path
    marks: str
    number: int
    total: int

    @property
    def name(self) -> str:
        shown = str(self.file.relative_to(ROOT))
        if self.marks == "gpu":
            shown += " (gpu)"
        if self.total > 1:
            shown += f", part {self.number} of {self.total}"
        return shown

    @property
    def stem(self) -> str:
        """The name of its files in the temporary folder."""
        return f"{self.file.stem}-{self.number}-{self.marks.replace(' ', '-')}"

    def command(self, folder: Path, timeout: float, device: str) -> list[str]:
        """The command of pytest."""
        command = [sys.executable, "-m", "pytest", str(self.file), "-q", "-m", self.marks]
        command += ["-p", "_report_tests", "--no-header", "--tb=short"]
        command += ["-W", "default"]  # warnings of another torch, and of CUDA, are no failures
        command.append(f"--basetemp={folder / self.stem}")
        command.append(f"--timeout={timeout:g}")
        if device == "cuda" and self.file.name == "test_conformance.py":
            command += ["-k", "not ddp and not fsdp and not deepspeed"]  # two processes would need two GPUs
        return command


def divide(files: list[Path], marks: str, processes: Mapping[str, int]) -> list[Part]:
    """The parts of files, in their order."""
    parts = []
    for file in files:
        total = processes.get(file.name, 1)
        parts += [Part(file, marks, number, total) for number in range(1, total + 1)]
    return parts


def run_part(
    part: Part, device: str, folder: Path, timeout: float, records: Records, budget: Budget, lock: threading.Lock
) -> None:
    """Run the tests of a part; each is a record."""
    if not budget.fits(START_SECONDS):
        with lock:
            records.skip(part.name, "tests", START_SECONDS, budget)
        return
    outcomes = folder / f"{part.stem}.jsonl"
    log = folder / f"{part.stem}.log"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "FASTLOOP_TEST_RECORDS": str(outcomes),
        "FASTLOOP_TEST_PART": f"{part.number}/{part.total}",
        "FASTLOOP_TEST_STRATEGIES": "",
        "OMP_NUM_THREADS": "2",
    }
    if device == "cuda":
        environment["FASTLOOP_TEST_DEVICE"] = "auto"
    limit = min(FILE_SECONDS, budget.left() - 2 - ENDING_SECONDS)
    status = run_limited(part.command(folder, timeout, device), log, limit, environment, cwd=ROOT)
    with lock:
        tests = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
        for test in tests:
            if test["outcome"] != "passed":
                records.write({"kind": "test", "device": device, **test})
        counts = Counter(test["outcome"] for test in tests)
        shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        records.add("file", shown, name=part.name, **counts)
        if counts["failed"]:
            records.keep_log(part.name, "tests", log)
        if status is None and limit < FILE_SECONDS:
            records.cut(part.name, "tests", budget)
        elif status is None:
            records.error(part.name, "tests", f"{log.read_text()[-2000:]}\nnot done after {limit:.0f} s", log)
        elif status == 2 and counts["skipped"]:  # the file needs a package that the machine lacks
            pass
        elif status not in (0, 1, 5):  # all passed, some failed, no tests found
            records.error(part.name, "tests", f"{log.read_text()[-2000:]}\npytest ended with {status}", log)


def tests_in(folder: str, names: Collection[str]) -> list[Path]:
    """The files of tests in a folder; with names only those."""
    files = sorted((ROOT / folder).rglob("test_*.py"))
    return [file for file in files if not names or file.name in names]


def main() -> None:
    """Run the tests of a command."""

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a test (default 60)")
        parser.add_argument(
            "--parallel",
            type=int,
            help="processes at once (default: half of the cores; 8 at most for tests that need a GPU)",
        )
        parser.add_argument("--files", nargs="+", help="names of files in tests/plugins, instead of all")
        parser.add_argument(
            "--plugins", action="store_true", help="the tests of the plugins, instead of those that need a GPU"
        )

    settings = options(__doc__, prepare)
    budget = command_budget(settings.seconds)
    records = Records(settings.results / "gpu-tests.jsonl")
    device = find_device()
    command = "plugin-tests" if settings.plugins else "tests"
    records.add("facts", **facts(device), tiny=settings.tiny, command=command)
    names = settings.files or (TINY if settings.tiny else ())
    parallel = settings.parallel or max(1, (os.cpu_count() or 2) // 2)
    if settings.plugins:
        files = [file for file in tests_in("tests/plugins", names) if file.parent.name != "strategies"]
        files.sort(key=lambda file: file.name in LAST)
        parts = divide(files, "not gpu and not slow", LAST)
    else:
        files = [file for file in tests_in("tests", names) if "mark.gpu" in file.read_text()]
        files.sort(key=lambda file: file.name not in PROCESSES)
        parts = divide(files, "gpu", PROCESSES)
        parallel = min(parallel, 8)
    lock = threading.Lock()
    with scratch() as folder, ThreadPoolExecutor(parallel) as pool:
        running = [
            pool.submit(run_part, part, device, folder, settings.timeout, records, budget, lock) for part in parts
        ]
        for part in running:
            part.result()

    from report import show_tests

    print(f"\n{show_tests(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" or line.get("outcome") == "failed" for line in records.lines))


if __name__ == "__main__":
    main()
