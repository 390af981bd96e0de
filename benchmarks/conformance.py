"""What every plugin of ours and of examples/ promises, and whether it keeps it: runs the conformance suite, writes docs/conformance.md.

    python benchmarks/conformance.py                     # runs the suite, for ours and the examples': ten minutes on two cores
    python benchmarks/conformance.py --report FILE.xml   # takes a report that `pytest --junitxml=FILE.xml` wrote

A row a plugin, a column a check: passed, FAILED, or a number that stands for a reason below why it was not made.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "tests" / "plugins" / "test_conformance.py"
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
TABLE = ROOT / "docs" / "conformance.md"
CHECKS = {
    "declared": "declared",
    "options": "options",
    "documented": "documented",
    "parity": "parity class",
    "saved_and_loaded": "saved, loaded",
    "killed": "killed, resumed",
    "off": "off",
}
"""Check -> its column; `processes[...]` are further columns, one a strategy."""
OUTCOMES = {"failure": "FAILED", "error": "FAILED", "skipped": ""}


def install(folder: Path) -> None:
    """Put the examples into a folder, and have this process and those that it starts find them there."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", f"--target={folder}"]
    subprocess.run([*pip, *map(str, EXAMPLES)], check=True)
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = str(folder)


def run(tests: Path, report: Path) -> None:
    """Run tests that hold the suite, a file's or a package's; that something in it fails is part of the table."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup", f"--junitxml={report}"]
    if tests.is_dir():
        command += ["-c", str(tests / "pyproject.toml"), "-k", "Conformance"]
    done = subprocess.run([*command, str(tests)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"error: pytest ended with {done.returncode}")


def read(*reports: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Plugin -> check -> what became of it and why; ``cost`` has the seconds of a step without and with it."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        said = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        if "plugin" not in said:
            continue
        row, check = found.setdefault(said["plugin"], {}), case.get("name", "").removeprefix("test_").partition("@")[0]
        outcome = next((child for child in case if child.tag in OUTCOMES), None)
        row[check] = ("passed", "") if outcome is None else (OUTCOMES[outcome.tag], outcome.get("message", ""))
        if check == "cost":
            row[check] = said.get("seconds a step without it", ""), said.get("seconds a step with it", "")
    return found


def table(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The page's table, and below it why checks were not made or failed."""
    from fastloop.registry import load

    pairs = sorted({check for row in found.values() for check in row if check.startswith("processes[")})
    columns = CHECKS | {check: f"two processes, {check.removeprefix('processes[').rstrip(']')}" for check in pairs}
    head = ["plugin", "promises", *columns.values(), "a step without, with (ms)"]
    lines, reasons = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], []
    for name, row in sorted(found.items()):
        cells = [name, load(name).parity]
        for check in columns:
            outcome, why = row.get(check, ("", "not reported"))
            if why and why not in reasons:
                reasons.append(why)
            cells.append(" ".join(filter(None, [outcome, why and f"({reasons.index(why) + 1})"])))
        cells.append(", ".join(f"{1000 * float(seconds):.2f}" if seconds else "-" for seconds in row.get("cost", ("", ""))))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {' '.join(why.split())}" for number, why in enumerate(reasons, 1))]) + "\n"


def main() -> None:
    """Run, and write the page; ends with 1 when a plugin breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, nargs="+", default=[], help="reports of pytest's, instead of a run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder, "examples"))
        suites = {Path(folder, f"{tests.stem}.xml"): tests for tests in (SUITE, *EXAMPLES)}
        for report, tests in () if options.report else suites.items():
            run(tests, report)
        text = table(found := read(*(options.report or suites)))
    TABLE.write_text(
        "# What plugins promise, and whether they keep it\n\n"
        f"Generated by `make conformance` ({Path(__file__).name}) from a run of the suite that other packages use too "
        "(`fastloop.testing.Conformance`; what each check is: [testing.md](testing.md)). A number in brackets: not checked, for the reason "
        "below. The last column is the median time of a step of a tiny model on the CPU, without the plugin and with it, in turn: what its "
        "hooks cost, not what it gains on a model of a useful size. The packages of examples/ are here too.\n\n" + text
    )
    sys.exit(any(outcome == "FAILED" for row in found.values() for outcome, _ in row.values()))


if __name__ == "__main__":
    main()
