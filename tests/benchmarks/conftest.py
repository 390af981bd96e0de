"""Fixtures for tests of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from gpu_suite import BENCHMARKS


@pytest.fixture
def suite_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite's modules can be imported; ``peers`` and others are not those of another test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    yield
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
