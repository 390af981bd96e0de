"""Fixtures of fastloop.testing, and the teachers."""

import pytest

pytest_plugins = ["fastloop.testing"]


@pytest.fixture(scope="session", autouse=True)
def teachers():
    """Train the teachers."""
    from distill_runs import train_teachers

    train_teachers()


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """A current folder with the texts of ``fastloop.testing``."""
    from fastloop.testing import write_texts

    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
