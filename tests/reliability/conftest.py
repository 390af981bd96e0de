"""What the table of faults is made of: each test's docstring, "fault: promise", goes into pytest's report (`--junitxml`).

A test that tries more than one fault records how many: ``record_property("faults", n)``. benchmarks/reliability.py does the rest.
"""

from __future__ import annotations

import inspect

import pytest
from saving_helpers import times


def pytest_itemcollected(item: pytest.Function) -> None:
    fault, _, promise = (inspect.getdoc(item.obj) or "").partition(": ")
    item.user_properties += [("fault", fault), ("promise", promise), ("times", times(1))]
