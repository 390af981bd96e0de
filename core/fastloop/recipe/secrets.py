"""Secrets: what is called a token, a key or a password is in nothing that fastloop writes or shows.

Names decide which values these are: of environment variables (``HF_TOKEN``, ``AWS_SECRET_ACCESS_KEY``), and of a recipe's keys
(``data.arguments.api_key``). ``(hidden)`` stands in their place in the log, the console, the summary, the saved recipe and checkpoints. A
saved recipe that had one asks for it again.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from fastloop.errors import RecipeError

HIDDEN = "(hidden)"
SHORTEST = 6
"""Characters of a value that is looked for inside text: a shorter one would be found in words that mean something else."""
_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|(API)?KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$", re.IGNORECASE)
_KEY = re.compile(
    r"(^|[_-])(token|secret|password|passwd|passphrase|credentials?|(api|access|secret|private|auth)[_-]?key)$", re.IGNORECASE
)
_OF_TEXTS = re.compile(r"(pad|bos|eos|unk|sep|cls|mask|start|end|special)[_-]token$", re.IGNORECASE)
"""Keys of tokenizers, which hold no secret."""
_remembered: set[str] = set()


def is_secret(key: Any) -> bool:
    """Whether a recipe's key is called like something that holds a secret."""
    return isinstance(key, str) and bool(_KEY.search(key)) and not _OF_TEXTS.search(key)


def remember(tree: Any, where: str, secret: bool = False) -> None:
    """Keep the secret values of a recipe, so that they are hidden in text too.

    Raises:
        RecipeError: One was hidden when the recipe was written.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            remember(value, f"{where}: {key}" if ": " not in where else f"{where}.{key}", is_secret(key))
    elif isinstance(tree, list):
        for value in tree:
            remember(value, where, secret)
    elif isinstance(tree, str) and HIDDEN in tree:
        raise RecipeError(f"{where}: found {HIDDEN}: a secret, which was left out when this recipe was written. Set it again.")
    elif secret and tree is not None and not isinstance(tree, bool):
        _remembered.add(str(tree))


def hide(text: str) -> str:
    """A text without secret values."""
    variables = {value for name, value in os.environ.items() if _VARIABLE.search(name)}
    for value in sorted(variables | _remembered, key=len, reverse=True):
        if len(value) >= SHORTEST:
            for shown in (value, repr(value)[1:-1], json.dumps(value)[1:-1]):
                text = text.replace(shown, HIDDEN)
    return text


def hidden(tree: Any, secret: bool = False) -> Any:
    """A tree of mappings, lists and values without secrets: by their keys, and wherever else they occur."""
    if isinstance(tree, Mapping):
        return {hide(key) if isinstance(key, str) else key: hidden(value, is_secret(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hidden(value, secret) for value in tree]
    if secret and tree is not None and not isinstance(tree, bool):
        return HIDDEN
    return hide(tree) if isinstance(tree, str) else tree


class Formatter(logging.Formatter):
    """A log's lines, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))
