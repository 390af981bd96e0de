"""Hide secrets (tokens, keys, passwords) in everything that fastloop writes or prints.

The names of environment variables (``HF_TOKEN``, ``AWS_SECRET_ACCESS_KEY``) and of recipe keys (``data.arguments.api_key``) decide which
values are secret. ``(hidden)`` replaces them. To use a saved recipe, set its secrets again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from fastloop.errors import RecipeError

HIDDEN = "(hidden)"
MIN_LENGTH = 6
"""Minimum characters of a value to hide inside text. Shorter values could match parts of ordinary words."""
_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|(API)?KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$", re.IGNORECASE)
_KEY = re.compile(
    r"(^|[_-])(token|secret|password|passwd|passphrase|credentials?|(api|access|secret|private|auth)[_-]?key)$", re.IGNORECASE
)
_TOKENIZER_KEY = re.compile(r"(pad|bos|eos|unk|sep|cls|mask|start|end|special)[_-]token$", re.IGNORECASE)
"""Keys of tokenizers, which are not secret."""
_remembered: set[str] = set()


def is_secret(key: Any) -> bool:
    """Whether the name of a recipe's key suggests a secret."""
    return isinstance(key, str) and bool(_KEY.search(key)) and not _TOKENIZER_KEY.search(key)


@functools.cache
def _is_secret_variable(name: str) -> bool:
    return bool(_VARIABLE.search(name))


def remember(tree: Any, where: str, secret: bool = False) -> None:
    """Remember the secret values of a recipe, to hide them inside text, too.

    Raises:
        RecipeError: A value is ``(hidden)``, because this is a saved recipe.
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
    """Replace secret values in a text."""
    variables = {os.environ[name] for name in os.environ if _is_secret_variable(name)}
    for value in sorted(variables | _remembered, key=len, reverse=True):
        if len(value) >= MIN_LENGTH:
            for shown in (value, repr(value)[1:-1], json.dumps(value)[1:-1]):
                text = text.replace(shown, HIDDEN)
    return text


def hidden(tree: Any, secret: bool = False) -> Any:
    """Replace secrets in a tree of mappings, lists and values: values of secret keys, and secret values inside other text."""
    if isinstance(tree, Mapping):
        return {hide(key) if isinstance(key, str) else key: hidden(value, is_secret(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hidden(value, secret) for value in tree]
    if secret and tree is not None and not isinstance(tree, bool):
        return HIDDEN
    return hide(tree) if isinstance(tree, str) else tree


class Formatter(logging.Formatter):
    """Hides secrets in log messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))
