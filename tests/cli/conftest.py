"""The command line, called as a program is."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from fastloop.cli import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line in this process: ``cli("plan", "quickstart")`` -> exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "300")  # a table's rows stay on their lines
    monkeypatch.setattr("rich._console", None)  # else one that an earlier test made, with its width

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fastloop", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return int(exited.value.code or 0), captured.out, captured.err

    return call
