"""Hide secrets (tokens, keys, passwords) in everything that fastloop writes or prints.

The names of environment variables (``HF_TOKEN``, ``PGPASSWORD``) and of recipe keys (``data.arguments.api_key``,
``accessToken``) decide which values are secret. The user and the password of a URL are secret, too. ``(hidden)``
replaces them. To use a saved recipe, set its secrets again.

Hide them before a tree becomes JSON or YAML: in the text of a file, a secret such as ``status`` would also replace the
file's own keys.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastloop.errors import RecipeError

HIDDEN = "(hidden)"
MIN_LENGTH = 6
"""Minimum characters of a value to hide inside text. Shorter values could match parts of ordinary words."""
_SECRET = re.compile(
    # special tokens of tokenizers
    r"(?!.*(pad|bos|eos|unk|sep|cls|mask|start|end|special|image|audio|video|stop|first|last|next|per|text)_token$).*"
    r"((password|passwd|passphrase|passcode|secret|credential)s?"  # also clientsecret, PGPASSWORD
    r"|(^|_)(authorization|auth|bearer|cookies?|dsn|jwt|otp|pat|pwd|sas|webhook(_url)?|connection_?string)"
    r"|(^|_)(access|api|auth|bearer|csrf|id|refresh|session)?token|(^|_)(database|db|broker|mongo(db)?|mysql|postgres(ql)?|redis)_ur[il]"
    r"|(^|_)(access|account|admin|api|app|auth|client|consumer|deploy|encrypt(ion)?|gpg|hmac|license|master|private|rsa|secret|service"
    r"|session|shared|sign(ing)?|ssh|storage|subscription)_?key(_id)?|(^|(^|_)(admin|db|ftp|mail|pg|redis|root|smtp|user)_?)pass"
    r")(_?(v?[0-9]+|base|base64|config|json|new|old|text|value))*"
)
"""Names of secrets, in lower case with ``_`` between words."""
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
"""Where a word of a name ends: before a capital letter, and at signs between words."""
_PASSWORD = re.compile(r"://[^\s/:@]*:([^\s/\"',]+)@")
_URL_USER = re.compile(r"(?<=://)[^\s/:@]*:[^\s/\"',]+(?=@)|(?<=https://)[^\s/@\"',]+(?=@)")
_remembered: set[str] = set()


@functools.cache
def is_secret(key: Any) -> bool:
    """Whether the name of a recipe's key suggests a secret."""
    words = _WORD_ENDS.sub("_", str(key)).lower()  # hfAccessToken -> hf_access_token
    return _SECRET.fullmatch(words) is not None


def _is_secret_variable(name: str) -> bool:
    return name.upper().endswith(("_KEY", "_PASS")) or (name != "PWD" and is_secret(name))


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
        raise RecipeError(
            f"{where}: found {HIDDEN}: a secret, which was left out when this recipe was written.",
            code="hidden-secret",
            remedy="Set it again.",
        )
    elif tree is not None and not isinstance(tree, bool):
        _remembered.update([str(tree)] if secret else _PASSWORD.findall(str(tree)))


def hide(text: str, urls: bool = True) -> str:
    """Replace secret values in a text, and with ``urls`` the users and passwords of all URLs."""
    return _replace(text, _secret_texts(), urls)


def hidden(tree: Any, secret: bool = False) -> Any:
    """Replace secrets in a tree of mappings, lists and values: values of secret keys, and secret values inside other
    text.

    A key in lower case, such as ``status``, stays.
    """
    return _hidden(tree, secret, _secret_texts())


def _secret_texts() -> list[str]:
    """All texts to replace, longest values first: each secret value as it is, and as Python and JSON write it."""
    values = set(_remembered)
    for name, value in os.environ.items():
        if _is_secret_variable(name):
            values.add(value)
        if "://" in value:
            values.update(_PASSWORD.findall(value))
    texts = []
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= MIN_LENGTH:
            texts += [value, repr(value)[1:-1], json.dumps(value)[1:-1]]
    return texts


def _replace(text: str, secrets: Iterable[str], urls: bool = True) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _URL_USER.sub(HIDDEN, text) if urls else text


def _hidden(tree: Any, secret: bool, secrets: Sequence[str]) -> Any:
    """``hidden``, with the texts to replace: a recipe has a hundred values, and the environment is read once."""
    if isinstance(tree, Mapping):
        without_secrets = {}
        for key, value in tree.items():
            is_text = isinstance(key, str) and not re.fullmatch("[a-z_]+", key)
            without_secrets[_replace(key, secrets) if is_text else key] = _hidden(value, is_secret(key), secrets)
        return without_secrets
    if isinstance(tree, list | tuple):
        return [_hidden(value, secret, secrets) for value in tree]
    if secret and tree is not None and not isinstance(tree, bool):
        return HIDDEN
    return _replace(tree, secrets) if isinstance(tree, str) else tree
