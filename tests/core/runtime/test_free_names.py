"""Messages about an output folder that is in use: its contents, and a free name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.runtime.files import free_name, list_entries


@pytest.mark.parametrize(
    ("folder", "there", "expected"),
    [
        ("runs/a", (), "runs/a-sweep"),
        ("runs/a", ("runs/a-sweep",), "runs/a-sweep2"),
        ("runs/a", ("runs/a-sweep", "runs/a-sweep2"), "runs/a-sweep3"),
        ("a", (), "a-sweep"),
    ],
)
def test_a_free_name_is_beside_the_folder(folder, there, expected):
    for name in there:
        Path(name).mkdir(parents=True)
    assert free_name(Path(folder), "sweep") == Path(expected)


def test_a_free_name_for_the_current_folder_is_in_it():
    assert free_name(Path(), "run") == Path(f"{Path().resolve().name}-run")


def test_hidden_entries_are_listed_last():
    for name in (".lock", "b", "a"):
        Path(name).touch()
    assert list_entries(Path()) == "a, b, .lock"
    Path("c").touch()
    assert list_entries(Path()) == "a, b, c and 1 more"
