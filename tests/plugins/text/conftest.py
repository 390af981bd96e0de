"""Fixtures of the tests of texts."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop_plugins.text import tokens


@pytest.fixture
def encoded_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call that tokenizes."""
    counts = list[int]()
    encode = tokens._encode_rows

    def counted(*arguments: Any) -> Any:
        counts.append(len(arguments[-1]))
        return encode(*arguments)

    monkeypatch.setattr(tokens, "_encode_rows", counted)
    return counts
