"""Command lines that repeat or continue a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from fastloop import no_code
from fastloop.recipe import secrets


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line. A list is joined by commas; None, False and empty values are left out."""
    words = []
    for key, value in options.items():
        is_empty = value is None or value is False or value in ("", [])  # 0 is a value
        if is_empty:
            continue
        words.append(key)
        if isinstance(value, list):
            words.append(",".join(value))
        elif value is not True:
            words.append(str(value))
    return words


def command_line(name: str, words: Iterable[str], options: Mapping[str, Any]) -> str:
    """The command line that repeats a command; see ``option_words``."""
    return secrets.hide(shlex.join(["fastloop", name, *words, *option_words(options), *no_code.words()]))
