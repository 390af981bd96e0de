"""A pytest plugin that appends each test's outcome to the file in FASTLOOP_TEST_RECORDS, as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl
def pytest_runtest_logreport(report: Any) -> None:
    """Append a line for the call, or for a setup or teardown that failed."""
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
