"""The Python that a step runs, counted: the default plugins stay near the hand-written loop."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
from pinned import with_pinned_versions

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
CALLS = 62
"""Python function calls that a step may add to those of the raw loop: 60, of which the warning of a loss that is NaN
takes one at each log point."""
INSTRUCTIONS = 1860
"""Bytecode instructions that a step may add: 1,840 on Python 3.11 since each step asks whether samples were unreadable
and whether a map-style dataset needs ``set_epoch``; 1,809 before. The log reads memory once a second: one reading more
adds 17 to each of 60 steps."""


@pytest.mark.slow
@with_pinned_versions
def test_a_step_adds_few_calls_and_instructions_to_the_raw_loop(tmp_path: Path) -> None:
    found = tmp_path / "counts.json"
    done = forked.run(str(BENCHMARKS / "step_calls.py"), "--steps", "60", "--arms", "fastloop", "--json", str(found))
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["rows"]
    raw, ours = rows["raw"], rows["fastloop"]
    assert raw["calls"] > 50
    assert raw["instructions"] > 1000
    assert ours["calls"] - raw["calls"] <= CALLS
    assert ours["instructions"] - raw["instructions"] <= INSTRUCTIONS
