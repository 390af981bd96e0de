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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Checked:
    """The outcome of a check: ``passed``, ``skipped`` or ``FAILED``, and the reason."""

    outcome: str
    reason: str = ""


Checks = dict[str, Checked]
"""Check -> its outcome."""


def read(*reports: Path) -> dict[str, Checks]:
    """Plugin -> its checks."""
    plugins: dict[str, Checks] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            recorded = recorded_properties(case)
            if "plugin" not in recorded:
                continue
            name = recorded["plugin"]
            check = case.get("name", "").removeprefix("test_")
            checked = read_outcome(case)
            checks = plugins.setdefault(name, {})
            if check == f"processes[{name}]" and name not in STRATEGIES:  # a strategy of examples/, with itself
                for strategy in STRATEGIES:
                    reason = "with itself: it fills the slot 'strategy', too"
                    checks[f"processes[{strategy}]"] = Checked(checked.outcome, reason)
            else:
                checks[check] = checked
    return plugins


def read_outcome(case: ElementTree.Element) -> Checked:
    """The outcome of a test."""
    for child in case:
        if child.tag in OUTCOMES:
            return Checked(OUTCOMES[child.tag], child.get("message", ""))
    return Checked("passed")


class Reasons:
    """The reasons of a page, numbered from 1. Reasons that differ only in names of plugins are one."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, reason: str) -> int:
        """The number of a reason. Only its first sentence counts."""
        first = re.sub(r"recipe: (?=plugin|')|(?<=\.) .*", "", " ".join(reason.split()))
        without_names = re.sub(r"'[^']*'", "", first)
        if without_names not in self._numbers:
            self.shown.append(first)
            self._numbers[without_names] = len(self.shown)
        return self._numbers[without_names]


def describe(checks: Checks, reasons: Reasons) -> str:
    """The checks that a plugin did not pass, such as ``resume, amp (1); compile FAILED (2)``."""
    names = dict.fromkeys([*CHECKS, *(f"processes[{name}]" for name in STRATEGIES)])
    names |= dict.fromkeys(check for check in checks if check.startswith("processes["))
    titles: dict[str, list[str]] = {}  # by the number of their reason
    for name in names:
        checked = checks.get(name, Checked("skipped", "not reported"))
        if checked.outcome == "passed" and not checked.reason:
            continue
        title = CHECKS.get(name) or name.removeprefix("processes[").rstrip("]")
        if checked.outcome != "skipped":
            title += f" {checked.outcome}"
        number = f" ({reasons.number(checked.reason)})" if checked.reason else ""
        titles.setdefault(number, []).append(title)
    return "; ".join(f"{', '.join(listed)}{number}" for number, listed in titles.items()) or "all passed"


def lists(plugins: dict[str, Checks]) -> str:
    """The plugins by the checks that they did not pass, with the reasons below."""
    reasons = Reasons()
    groups: dict[str, list[str]] = {}
    for name, checks in sorted(plugins.items()):
        groups.setdefault(describe(checks, reasons), []).append(name)
    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    entries = [f"- {checks}: `{', '.join(names)}`" for checks, names in largest_first]
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons.shown, 1)]
    return "\n".join([*entries, "", *numbered]) + "\n"


def main() -> None:
    """Run the suite, and write the page. Exits with 1 if a plugin fails a check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, nargs="+", default=[], help="reports of pytest's, instead of a run")
    options = parser.parse_args()
    os.environ["FASTLOOP_TEST_STRATEGIES"] = ",".join(STRATEGIES)
    os.environ["FASTLOOP_RELIABILITY"] = "1"  # every check on processes
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder, "examples"))
        suites = {Path(folder, f"{tests.stem}.xml"): tests for tests in (SUITE, *EXAMPLES)}
        if not options.report:
            for report, tests in suites.items():
                is_package = tests.is_dir()
                arguments = ["-c", str(tests / "pyproject.toml"), "-k", "Conformance"] if is_package else []
                run_suite(tests, report, *arguments)
        plugins = read(*(options.report or suites))
    text = lists(plugins)
    TABLE.write_text(
        "# Promises of plugins, checked\n"
        "\n"
        f"Generated by `make conformance` ({Path(__file__).name}) from a run of `fastloop.testing.Conformance`, which "
        f"[testing.md](testing.md) describes. The checks: {', '.join(CHECKS.values())}, and two processes with "
        f"{', '.join(STRATEGIES)}. An entry names the checks that its plugins skip, with the number of the reason, "
        "which shows one of them; all others passed. The packages of examples/ are included.\n\n" + text
    )
    failed = [name for name, checks in plugins.items() if any(one.outcome == "FAILED" for one in checks.values())]
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
