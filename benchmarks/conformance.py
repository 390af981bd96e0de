"""Run the conformance suite on all plugins of fastloop and of examples/, and write docs/conformance.md.

    python benchmarks/conformance.py                     # runs the suite: ten minutes on two cores
    python benchmarks/conformance.py --report FILE.xml   # takes a report of `pytest --junitxml=FILE.xml`

One row for each plugin, one column for each check: passed, FAILED, or skipped, with the number of the reason below the
table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _measure import ROOT, recorded_properties, run_suite

SUITE = ROOT / "tests" / "plugins" / "test_conformance.py"
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
TABLE = ROOT / "docs" / "conformance.md"
CHECKS = {
    "declared": "declared",
    "options": "options",
    "documented": "documented",
    "numerics": "numerics class",
    "batch_norm": "batch norm",
    "saved_and_loaded": "saved, loaded",
    "killed": "killed, resumed",
    "off": "off",
}
"""Check -> its column. `processes[...]` are further columns, one for each of our strategies."""
STRATEGIES = ("ddp", "deepspeed", "fsdp")
OUTCOMES = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}


def install(folder: Path) -> None:
    """Copy the examples to a folder, and make them importable in this process and its children."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", f"--target={folder}"]
    subprocess.run([*pip, *map(str, EXAMPLES)], check=True)
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = str(folder)


def read(*reports: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Plugin -> check -> result and reason; ``cost`` holds the seconds of a step without and with the plugin."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        recorded = recorded_properties(case)
        if "plugin" not in recorded:
            continue
        row, check = found.setdefault(recorded["plugin"], {}), case.get("name", "").removeprefix("test_")
        outcome = next((child for child in case if child.tag in OUTCOMES), None)
        row[check] = ("passed", "") if outcome is None else (OUTCOMES[outcome.tag], outcome.get("message", ""))
        # a strategy of examples/, with itself
        if check == f"processes[{recorded['plugin']}]" and recorded["plugin"] not in STRATEGIES:
            result = row.pop(check)[0]
            row |= {
                f"processes[{name}]": (result, "with itself: it fills the slot 'strategy', too") for name in STRATEGIES
            }
        if check == "cost":
            row[check] = recorded.get("seconds a step without it", ""), recorded.get("seconds a step with it", "")
    return found


def table(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The table of the page, with the reasons of failed and skipped checks below it."""
    from fastloop.plugins.installed import load

    pairs = sorted({check for row in found.values() for check in row if check.startswith("processes[")})
    columns = CHECKS | {check: f"two processes, {check.removeprefix('processes[').rstrip(']')}" for check in pairs}
    head = ["plugin", "promises", "not passed, or with a note", "a step without, with (ms)"]
    lines, reasons = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], []
    for name, row in sorted(found.items()):
        noted = []
        for check, title in columns.items():
            outcome, why = row.get(check, ("skipped", "not reported"))
            if why and why not in reasons:
                reasons.append(why)
            if outcome != "passed" or why:
                shown = title if outcome == "skipped" else f"{title}: {outcome}"
                noted.append(f"{shown} ({reasons.index(why) + 1})" if why else shown)
        cost = ", ".join(f"{1000 * float(seconds):.2f}" if seconds else "-" for seconds in row.get("cost", ("", "")))
        lines.append(f"| {name} | {load(name).numerics} | {'; '.join(noted)} | {cost} |")
    return (
        "\n".join([*lines, "", *(f"{number}. {' '.join(why.split())}" for number, why in enumerate(reasons, 1))]) + "\n"
    )


def main() -> None:
    """Run the suite, and write the page. Exits with 1 if a plugin fails a check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, nargs="+", default=[], help="reports of pytest's, instead of a run")
    options = parser.parse_args()
    os.environ["FASTLOOP_TEST_STRATEGIES"] = ",".join(STRATEGIES)
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder, "examples"))
        suites = {Path(folder, f"{tests.stem}.xml"): tests for tests in (SUITE, *EXAMPLES)}
        for report, tests in () if options.report else suites.items():
            run_suite(
                tests, report, *(["-c", str(tests / "pyproject.toml"), "-k", "Conformance"] if tests.is_dir() else [])
            )
        text = table(found := read(*(options.report or suites)))
    TABLE.write_text(
        "# Promises of plugins, checked\n"
        "\n"
        f"Generated by `make conformance` ({Path(__file__).name}) from a run of `fastloop.testing.Conformance`, the "
        "suite that other packages use too. [testing.md](testing.md) describes each check: "
        f"{', '.join(CHECKS.values())}, and two processes with {', '.join(STRATEGIES)}. A row names the checks that "
        "were skipped, with the number of the reason below the table. All others passed. The last column is the "
        "median time of a step of a tiny model on the CPU. It is the cost of the hooks, not the gain on a model of "
        "a useful size. The packages of examples/ are included.\n\n" + text
    )
    sys.exit(any(outcome == "FAILED" for row in found.values() for outcome, _ in row.values()))


if __name__ == "__main__":
    main()
