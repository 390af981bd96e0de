"""Text of others, shown in a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """A text without characters that change what a terminal shows, such as escape sequences: ``\\x1b`` instead of
    them."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
