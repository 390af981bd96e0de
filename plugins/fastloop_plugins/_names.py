"""Names in messages."""

from __future__ import annotations

from collections.abc import Sequence


def list_names(names: Sequence[str], most: int) -> str:
    """The first ``most`` names, and dots if there are more: ``a, b, ...`` for ``a``, ``b`` and ``c`` with two."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append("...")
    return ", ".join(shown)
