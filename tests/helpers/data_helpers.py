"""Helpers for the tests of data files: read the ``data`` section like a run, and collect its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastloop import Problem
from fastloop.errors import RecipeError
from fastloop.recipe import make_recipe
from fastloop_plugins.rows.split_rows import Rows
from fastloop_plugins.text.data import TextData


def text_data(files: dict[str, Any] | str | None = None, label: str | None = "label", **data: Any) -> TextData:
    """The section of a recipe that names ``files``; a path alone is the training file."""
    section: dict[str, Any] = {"validation_fraction": 0.0, "label": label} | data
    if files is not None:
        section["files"] = {"train": files} if isinstance(files, str) else files
    return TextData(make_recipe({"data": section}, Path("recipe.yaml")), labelled=label is not None)


def named_rows(data: TextData, role: str = "train") -> list[tuple[str, str | None]]:
    """Each row's text and the name of its class."""
    rows: Rows = data.load()[role]
    return list(
        zip(
            list(rows.texts),
            [None] * len(rows.texts) if rows.labels is None else [data.classes[i] for i in rows.labels],
            strict=True,
        )
    )


def problem_of(files: dict[str, Any] | str | None = None, **data: Any) -> Problem:
    """The problem of data that is refused."""
    with pytest.raises(RecipeError) as caught:
        text_data(files, **data).load()
    return caught.value.problem


def refusal(files: dict[str, Any] | str | None = None, **data: Any) -> str:
    """The message of ``problem_of``."""
    return str(problem_of(files, **data))


def write(path: str, content: str | bytes) -> str:
    """A file with exactly these characters or bytes."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
