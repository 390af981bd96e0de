"""Broken and odd data files are refused at the right place, or read right, in memory and as a file to predict."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_files import FILES
from data_helpers import named_rows, refusal, text_data


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.rows is not None])
def test_an_odd_file_is_read_as_it_is(name):
    file = FILES[name]
    Path(file.path).write_bytes(file.content)
    assert named_rows(text_data(file.path, read=file.read or None)) == file.rows


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.rows is None])
def test_a_broken_file_is_refused_with_its_place(name):
    file = FILES[name]
    Path(file.path).write_bytes(file.content)
    message = refusal(file.path)
    assert message.startswith(f"{file.path}{file.place}: ")


def test_no_file_is_left_out():
    assert len(FILES) == 65
