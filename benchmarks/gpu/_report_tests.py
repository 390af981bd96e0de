"""A plugin for pytest: each test's outcome goes to the file that FASTLOOP_TEST_RECORDS names, as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl
def pytest_runtest_logreport(report: Any) -> None:
    """Append a line: of the call, or of a set-up or tear-down that did not pass."""
    if report.when != "call" and report.passed:
        return
    outcome = "failed" if report.failed else report.outcome
    reason = ""
    if report.failed:
        reason = str(report.longrepr)[-1200:]
    elif report.skipped:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[:200]
    line = {"name": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2), "reason": reason}
    with Path(os.environ["FASTLOOP_TEST_RECORDS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
