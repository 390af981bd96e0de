"""Record the rows of the fault tables: each test's docstring, "fault: promise", goes into pytest's report.

A test of several faults records their number: ``record_property("faults", n)``. benchmarks/reliability.py writes the
tables.
"""

from __future__ import annotations

import inspect

import pytest
from fault_runs import times


def pytest_itemcollected(item: pytest.Function) -> None:
    fault, _, promise = " ".join((inspect.getdoc(item.obj) or "").split()).partition(": ")
    item.user_properties += [("fault", fault), ("promise", promise), ("times", times(1))]
