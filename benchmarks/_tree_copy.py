"""A copy of the tree that a benchmark changes, and the tests that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from _measure import ROOT


class TreeCopy:
    """A copy of the tree, in which tests run with the packages of this environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            source = ROOT / name
            target = folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        subprocess.run(["git", "add", "-A"], cwd=folder, check=True)  # tests of the repository list its files

    def collect(self, marks: str) -> list[str]:
        """The names of the tests with these marks, as pytest takes them, sorted."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--collect-only",
            "-p",
            "no:cacheprovider",
            "-m",
            marks,
            "tests",
        ]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"error: pytest cannot collect the tests.\n{done.stdout[-2000:]}")
        return sorted(line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line)

    def run(
        self, selected: Sequence[str], marks: str, timeout: float | None = None, **variables: str
    ) -> dict[str, bool] | None:
        """Run tests.

        Args:
            timeout: Seconds after which the tests are killed.
            variables: Environment variables to set.

        Returns:
            Each test that ran, as ``FILE::CLASS::NAME``, and whether it passed; None: they did not end in time.
        """
        report = self.folder.parent / "report.xml"
        report.unlink(missing_ok=True)
        arguments = self.folder.parent / "tests.txt"
        arguments.write_text("\n".join(selected))
        is_one_test = len(selected) == 1 and "::" in selected[0]
        workers = "0" if is_one_test else "auto"  # each worker imports torch, which takes longer than most tests
        command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "loadscope", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", "-m", marks, f"@{arguments}"]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment() | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return None
        return read_report(report)

    def _environment(self) -> dict[str, str]:
        """The environment of a process that imports the code of the copy."""
        paths = [self.folder / name for name in ("core", "plugins", "recipes")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [self.folder.parent, *paths])),
            "OMP_NUM_THREADS": "1",
            "FASTLOOP_TEST_STRATEGIES": "ddp",
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def read_report(report: Path) -> dict[str, bool]:
    """Each test of a report of pytest, and whether it passed. Skipped tests are left out."""
    if not report.exists():
        sys.exit("error: pytest wrote no report.")
    results: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if "skipped" in kinds:
            continue
        name = f"{case.get('file')}::{case.get('classname')}::{case.get('name')}"
        results[name] = results.get(name, True) and not kinds & {"failure", "error"}
    return results
