"""Lines of a log by their names and numbers, so that tests do not depend on the other words of a line."""

from __future__ import annotations

import re

import pytest


def find_lines(shown: str | pytest.LogCaptureFixture, expected: str) -> list[str]:
    """The lines of an output, or the messages of the fixture ``caplog``, that have all of some names and numbers.

    ``find_lines(caplog, "packing: 64")`` has "packing: rows are padded to a multiple of 64 tokens", and not "packing:
    640 rows". Errors and warnings have codes: see ``fastloop.testing.find_problems``.

    Args:
        expected: Names, keys and numbers, separated by spaces.
    """
    lines = shown.splitlines() if isinstance(shown, str) else shown.messages
    # 4 is a part of 40, of 1.4 and of 4,000, and none of them is meant
    patterns = [rf"(?<!\w)(?<!\d[.,]){re.escape(word)}(?!\w)(?![.,]\d)" for word in expected.split()]
    found = []
    for line in lines:
        if all(re.search(pattern, line) for pattern in patterns):
            found.append(line)
    return found
