"""benchmarks/differential.py: how numbers of two trainings are compared and shown. `make differential` trains."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"

NUMBERS = {
    "ids": [[1, 2], [1, 3]],
    "masks": [[0, 1], [0, 1]],
    "losses": [2.0, 1.0],
    "trained": 1000,
    "error": "",
}
CASES = {
    "rounding": ({"losses": [2.0, 1.00001]}, True, "5.0e-06"),
    "ids": ({"ids": [[1, 2], [1, 4]]}, False, "1 of 2"),
    "order": ({"ids": [[1, 3], [1, 2]]}, False, "0 of 2"),
    "one less": ({"ids": [[1, 2]]}, False, "1 of 2"),
    "masks": ({"masks": [[0, 1], [0, 0]]}, False, "1 of 2"),
    "no masks": ({"masks": []}, False, "0 of 2"),
    "losses": ({"losses": [2.0, 1.001]}, False, "5.0e-04"),
    "steps": ({"losses": [2.0]}, False, "-"),
    "trained": ({"trained": 900}, False, "900 and 1,000"),
    "error": ({"error": "ValueError: no"}, False, "-"),
}
"""Name -> changes of one side, whether both sides agree, and a cell of the table."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("name", CASES)
def test_a_difference_of_any_number_is_no_agreement(name):
    from _differential_rows import ROWS
    from differential import compare, describe, make_page

    changes, agrees, cell = CASES[name]
    row = ROWS[0]
    found = compare(NUMBERS | changes, NUMBERS)
    assert found.agrees() == agrees
    assert cell in describe(row, False, found)
    notes = make_page([(row, False, found)], "models", "versions").partition("## Differences")[2]
    assert (row.name in notes) == (not agrees)


def test_equal_numbers_without_masks_agree():
    from _differential_rows import ROWS
    from differential import compare, describe

    without = NUMBERS | {"masks": []}
    found = compare(without, without)
    assert found.agrees()
    assert "none" in describe(ROWS[0], True, found)


def test_there_are_different_samples_for_every_step():
    from _differential_rows import BATCH, SAMPLES, STEPS

    for name, make in SAMPLES.items():
        samples = make(STEPS * BATCH)
        assert len(samples) >= STEPS * BATCH, name
        assert len({str(sample) for sample in samples[:10]}) == 10, name
