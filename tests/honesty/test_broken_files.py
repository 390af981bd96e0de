"""Broken and odd data files are refused at the right place, or read right, in memory and as a file to predict."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_files import FILES
from data_helpers import named_rows, refusal, text_data

from fastloop.errors import RecipeError
from fastloop_plugins.text.chunks import text_chunks


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


LABELS = ("labels", "a label", "a header among objects")
"""Names of files whose texts can be predicted begin with one of these: no label is read."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_to_predict_has_the_same_rows_or_the_same_error(name):
    file = FILES[name]
    Path(file.path).write_bytes(file.content)
    data = text_data(file.path, read=file.read or None)
    if file.rows is not None:
        predicted = [text for texts, _ in text_chunks(data, Path(file.path), 0, 5) for text in texts]
        assert predicted == [text for text, _ in file.rows]
    elif not name.startswith(LABELS):
        with pytest.raises(RecipeError) as error:
            list(text_chunks(data, Path(file.path), 0, 5))
        assert first_sentence(str(error.value)) == first_sentence(refusal(file.path))


def first_sentence(message: str) -> str:
    """The place and the problem. The remedy may name the label, which no prediction reads."""
    return message.partition(". ")[0].rstrip(".")


def test_no_file_is_left_out():
    assert len(FILES) == 65
