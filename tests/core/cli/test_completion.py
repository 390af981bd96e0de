"""``fastloop --install-completion``, of typer: shells complete commands, options, shipped recipes and plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completed(line: str) -> list[str]:
    """The words that fastloop offers to bash for the last word of a command line."""
    words = line.split(" ")
    variables = {"_FASTLOOP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [Path(sys.executable).with_name("fastloop")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **variables},
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("fastloop tr", "train"),
        ("fastloop train --res", "--resume"),
        ("fastloop train qui", "quickstart"),
        ("fastloop new jo", "job"),
        ("fastloop train quickstart --with em", "ema"),
        ("fastloop train quickstart --without amp,em", "amp,ema"),
    ],
)
def test_the_last_word_of_a_line_is_completed(line, word):
    assert word in completed(line)


def test_a_word_that_fits_nothing_is_left_to_the_files_of_the_shell():
    assert completed("fastloop train ./my") == []
