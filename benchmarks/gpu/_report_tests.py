"""A pytest plugin that appends each test's outcome to the file in FASTLOOP_TEST_RECORDS, as soon as it is known. It
runs the part of the tests in FASTLOOP_TEST_PART.

A GPU machine may lack packages that fastloop or its tests need, such as datasets with pyarrow. A test that fails for
this reason is recorded as skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest


def missing_package(failure: str) -> str | None:
    """The package that is not installed, if a failure names one."""
    packages = re.findall(r"No module named '(\w+)", failure)
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of the part in FASTLOOP_TEST_PART, such as 2/3."""
    number, total = map(int, os.environ.get("FASTLOOP_TEST_PART", "1/1").split("/"))
    items[:] = items[number - 1 :: total]


ROOT = Path(__file__).resolve().parents[2]
"""The checkout. Records name its files by their paths below it, which hold on other machines."""


def add_line(**line: Any) -> None:
    """Append a record to the file in FASTLOOP_TEST_RECORDS."""
    line["reason"] = line["reason"].replace(f"{ROOT}/", "")
    with Path(os.environ["FASTLOOP_TEST_RECORDS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl
def pytest_collectreport(report: Any) -> None:
    """Append a line for a file that imports a package which the machine lacks."""
    if not report.failed:
        return
    package = missing_package(str(report.longrepr))
    if package is not None:
        add_line(name=report.nodeid, outcome="skipped", seconds=0.0, reason=f"{package} is not installed")


@pytest.hookimpl
def pytest_runtest_logreport(report: Any) -> None:
    """Append a line for the call, or for a setup or teardown that failed."""
    if report.when != "call" and report.passed:
        return
    outcome = "failed" if report.failed else report.outcome
    reason = ""
    if report.failed:
        reason = str(report.longrepr)[-1200:]
        package = missing_package(str(report.longrepr))
        if package is not None:
            outcome = "skipped"
            reason = f"{package} is not installed"
    elif report.skipped:
        skipped = report.longrepr
        if isinstance(skipped, tuple):  # file, line and reason
            skipped = skipped[2]
        reason = str(skipped)[:200]
    add_line(name=report.nodeid, outcome=outcome, seconds=round(report.duration, 2), reason=reason)
