"""Commands 1 and 6: the tests that need a GPU, and the tests of the plugins on the GPU.

    bash benchmarks/gpu/all.sh tests
    bash benchmarks/gpu/all.sh plugin-tests

Each file of tests runs in its own process, a few at a time: an error that breaks a device's context breaks one file.
The first command runs the tests marked ``gpu``. The second one runs the files of ``tests/plugins``, except those of
strategies, without their slow tests: ``tiny_run`` and the conformance suite train on the device there. Each test is a
record. It may take ``--timeout`` seconds if pytest-timeout is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _measure import ROOT
from _suite import Budget, Records, facts, find_device, options, scratch

FILE_SECONDS = 240.0
"""Seconds that a file of tests may take."""
TINY = ("test_small_speedups.py", "test_device_prefetch.py")
"""Files of ``tests/plugins`` for ``--tiny``."""
LAST = ("test_conformance.py", "test_all_plugins.py")
"""Files of ``tests/plugins`` that take longest and mostly need no GPU; they run last."""


def run_file(
    file: Path,
    marks: str,
    device: str,
    folder: Path,
    timeout: float,
    records: Records,
    budget: Budget,
    lock: threading.Lock,
) -> None:
    """Run the tests of one file; each is a record."""
    name = f"{file.relative_to(ROOT)}{' (gpu)' * (marks == 'gpu')}"
    if not budget.fits(20):
        with lock:
            records.add("skipped", name=name, why="no time")
        return
    found = folder / f"{file.stem}-{marks.replace(' ', '-')}.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(file),
        "-q",
        "-m",
        marks,
        "-p",
        "_report_tests",
        "--no-header",
        "--tb=short",
    ]
    command += ["-W", "default"]  # warnings of another torch, and of CUDA, are no failures
    command += [f"--basetemp={found.with_suffix('')}"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={timeout:g}")
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    given = {
        "PYTHONPATH": paths,
        "FASTLOOP_TEST_RECORDS": str(found),
        "FASTLOOP_TEST_STRATEGIES": "",
        "OMP_NUM_THREADS": "2",
    }
    if device == "cuda":
        given["FASTLOOP_TEST_DEVICE"] = "auto"
        if file.name == "test_conformance.py":
            command += ["-k", "not ddp and not fsdp and not deepspeed"]  # two processes would need two GPUs
    limit, output, ended = min(FILE_SECONDS, budget.left() - 5), "", ""
    with (folder / f"{found.stem}.log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | given, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if (code := process.wait(limit)) not in (0, 1, 5):  # all passed, some failed, no tests found
                ended = f"pytest ended with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            ended = f"not done after {limit:.0f} s"
        log.seek(0)
        output = log.read()
    with lock:
        tests = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
        for test in tests:
            records.write({"kind": "test", "device": device, **test})
        counts = Counter(test["outcome"] for test in tests)
        records.add("file", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), name=name, **counts)
        if counts["failed"]:
            records.keep_log(name, "tests", folder / f"{found.stem}.log")
        if ended:
            records.error(name, "tests", f"{output[-2000:]}\n{ended}", folder / f"{found.stem}.log")


def main() -> None:
    """Run the tests of a command."""

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a test (default 60)")
        parser.add_argument("--parallel", type=int, help="files at once (default: half of the cores)")
        parser.add_argument("--files", nargs="+", help="names of files in tests/plugins, instead of all")
        parser.add_argument(
            "--plugins", action="store_true", help="the tests of the plugins, instead of those that need a GPU"
        )

    settings = options(__doc__, prepare)
    budget, records, device = (
        Budget(settings.seconds),
        Records(settings.results / f"gpu-{'plugin-' * settings.plugins}tests.jsonl"),
        find_device(),
    )
    records.add("facts", **facts(device), tiny=settings.tiny)
    marked = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    names = settings.files or (TINY if settings.tiny else ())
    plugins = [
        file for file in sorted((ROOT / "tests" / "plugins").rglob("test_*.py")) if file.parent.name != "strategies"
    ]
    plugins = [file for file in plugins if not names or file.name in names]
    plugins.sort(key=lambda file: file.name in LAST)
    if names:
        marked = [file for file in marked if file.name in names]
    lock = threading.Lock()
    parallel = settings.parallel or max(1, (os.cpu_count() or 2) // 2)
    files, marks, at_once = (
        (plugins, "not gpu and not slow", parallel) if settings.plugins else (marked, "gpu", min(parallel, 4))
    )
    with scratch() as folder, ThreadPoolExecutor(at_once) as pool:
        list(
            pool.map(lambda file: run_file(file, marks, device, folder, settings.timeout, records, budget, lock), files)
        )

    from report import show_tests

    print(f"\n{show_tests(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" or line.get("outcome") == "failed" for line in records.lines))


if __name__ == "__main__":
    main()
