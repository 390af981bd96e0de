"""Run the conformance suite on all plugins of fastloop and of examples/, and write docs/conformance.md.

    python benchmarks/conformance.py                     # runs the suite: ten minutes on two cores
    python benchmarks/conformance.py --report FILE.xml   # takes a report of `pytest --junitxml=FILE.xml`

One entry for each set of checks that were skipped or FAILED, with the numbers of the reasons below, and its plugins.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _measure import ROOT, recorded_properties, run_suite

SUITE = ROOT / "tests" / "plugins" / "test_conformance.py"
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
"""Check -> its name on the page. `processes[...]` are further checks, one for each of our strategies."""
STRATEGIES = ("ddp", "deepspeed", "fsdp")
OUTCOMES = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}


def examples_with_a_suite() -> list[Path]:
    """The packages of examples/ whose tests run the suite.

    The plugin of `vllm-server` serves the task of another package, so its tests do not.
    """
    packages = []
    for package in sorted(ROOT.glob("examples/*/pyproject.toml")):
        tests = package.parent.glob("tests/test_*.py")
        if any("Conformance" in file.read_text() for file in tests):
            packages.append(package.parent)
    return packages


EXAMPLES = examples_with_a_suite()


def install(folder: Path) -> None:
    """Copy the examples to a folder, and make them importable in this process and its children."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", f"--target={folder}"]
    subprocess.run([*pip, *map(str, EXAMPLES)], check=True)
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = str(folder)


def read(*reports: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Plugin -> check -> result and reason."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        recorded = recorded_properties(case)
        if "plugin" not in recorded:
            continue
        row = found.setdefault(recorded["plugin"], {})
        check = case.get("name", "").removeprefix("test_")
        outcome = next((child for child in case if child.tag in OUTCOMES), None)
        row[check] = ("passed", "") if outcome is None else (OUTCOMES[outcome.tag], outcome.get("message", ""))
        # a strategy of examples/, with itself
        if check == f"processes[{recorded['plugin']}]" and recorded["plugin"] not in STRATEGIES:
            result = row.pop(check)[0]
            row |= {
                f"processes[{name}]": (result, "with itself: it fills the slot 'strategy', too") for name in STRATEGIES
            }
    return found


def lists(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The plugins by the checks that they did not pass, with the reasons below. Reasons that differ only in names of
    plugins share a number, and the first one is shown."""
    expected = [*CHECKS, *(f"processes[{name}]" for name in STRATEGIES)]
    reasons: dict[str, tuple[int, str]] = {}
    groups: dict[str, list[str]] = {}
    for name, row in sorted(found.items()):
        noted: dict[str, list[str]] = {}
        for check in dict.fromkeys([*expected, *(check for check in row if check.startswith("processes["))]):
            title = CHECKS.get(check) or check.removeprefix("processes[").rstrip("]")
            outcome, why = row.get(check, ("skipped", "not reported"))
            if outcome != "passed" or why:
                first = re.sub(r"recipe: (?=plugin|')|(?<=\.) .*", "", " ".join(why.split()))
                number, _ = reasons.setdefault(re.sub(r"'[^']*'", "", first), (len(reasons) + 1, first))
                noted.setdefault(f" ({number})" if why else "", []).append(
                    title if outcome == "skipped" else f"{title} {outcome}"
                )
        key = "; ".join(f"{', '.join(titles)}{number}" for number, titles in noted.items()) or "all passed"
        groups.setdefault(key, []).append(name)
    entries = [
        f"- {key}: `{', '.join(names)}`" for key, names in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    return "\n".join([*entries, "", *(f"{number}. {why}" for number, why in reasons.values())]) + "\n"


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
        text = lists(found := read(*(options.report or suites)))
    TABLE.write_text(
        "# Promises of plugins, checked\n"
        "\n"
        f"Generated by `make conformance` ({Path(__file__).name}) from a run of `fastloop.testing.Conformance`, which "
        f"[testing.md](testing.md) describes. The checks: {', '.join(CHECKS.values())}, and two processes with "
        f"{', '.join(STRATEGIES)}. An entry names the checks that its plugins skip, with the number of the reason, "
        "which shows one of them; all others passed. The packages of examples/ are included.\n\n" + text
    )
    sys.exit(any(outcome == "FAILED" for row in found.values() for outcome, _ in row.values()))


if __name__ == "__main__":
    main()
