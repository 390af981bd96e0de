"""No test sees what an earlier one has left in its process."""

from __future__ import annotations

import os

import pytest
from environment_check import unchanged_environment


def set_world_size(value: str | None) -> None:
    os.environ.pop("WORLD_SIZE", None)
    if value is not None:
        os.environ["WORLD_SIZE"] = value


@pytest.mark.parametrize(
    ("before", "after"), [(None, "2"), ("1", "2"), ("1", None)], ids=["added", "changed", "removed"]
)
def test_changed_environment_variables_fail_a_test_and_are_restored(monkeypatch, before, after):
    monkeypatch.setenv("WORLD_SIZE", "")  # restored after this test
    set_world_size(before)
    with pytest.raises(AssertionError, match="WORLD_SIZE"), unchanged_environment():
        set_world_size(after)
    assert os.environ.get("WORLD_SIZE") == before
