"""The values of a recipe that can name code, files or URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastloop.recipe import Recipe

IMPORT_KEYS = re.compile(
    r"(model|data)\.module|train\.optimizer(\.name)?|plugins\.[^.]+\.(schedule|callbacks|collate|loss(\.name)?|metrics\.[^.]+\.type)"
    r"|plugins\.deepspeed\.config: .+"
)
"""Keys whose values fastloop's own plugins import, if they have the form ``package.module:name`` or
``file.py:name``."""
PATH_KEYS = re.compile(
    r"data\.(files\..+|images|chat_template)|model\.weights|plugins\.(deepspeed\.config|token-cache\.folder)"
)
"""Keys whose values fastloop's own plugins open as files or folders."""
HUB_KEYS = re.compile(r"(model|data)\.name|model\.tokenizer")
"""Keys whose values are local folders, or names on the hub."""
PICKLES = (".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
"""Suffixes of files that may hold pickles, which can run any code."""
SWITCHES = {
    "allow_pickle": (False, "loads pickles"),
    "trust_remote_code": (False, "runs the code that comes with a model or dataset"),
    "weights_only": (True, "loads pickles without the restriction to tensors"),
}
"""Key -> the only safe value. With another one, libraries run code that is not installed; and why."""


@dataclass(frozen=True)
class Value:
    """A value of a recipe.

    Attributes:
        key: Its dotted key, such as ``data.module``.
        value: Text, a number or None. For a key of ``SWITCHES``: anything.
        arguments: For ``module``, ``name`` and ``type``: the values beside it. For a key of a mapping: its value.
    """

    key: str
    value: Any
    arguments: Any = None

    @property
    def text(self) -> str:
        """The value as text."""
        return str(self.value)


def values_of(recipe: Recipe) -> Iterator[Value]:
    """The values of ``model``, ``data``, ``train.optimizer``, the plugins' options, and DeepSpeed's JSON file."""
    yield from _walk("model", recipe.model)
    yield from _walk("data", recipe.data)
    yield from _walk("train.optimizer", recipe.train.optimizer)
    for name, options in recipe.plugins.items():
        if options is not False:
            yield from _walk(f"plugins.{name}", options)
    yield from _deepspeed_values(recipe)


def _deepspeed_values(recipe: Recipe) -> Iterator[Value]:
    """The values of the JSON file ``plugins.deepspeed.config``. DeepSpeed imports classes that it names
    (``package.module.Class``)."""
    options = recipe.plugins.get("deepspeed") or {}
    try:
        tree = json.loads(recipe.find(str(options.get("config"))).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    yield from _walk("plugins.deepspeed.config", tree)
    autocast = tree.get("torch_autocast") if isinstance(tree, Mapping) else None
    classes = autocast.get("lower_precision_safe_modules") if isinstance(autocast, Mapping) else None
    for name in classes if isinstance(classes, list) else ():
        yield Value("plugins.deepspeed.config: lower_precision_safe_modules", ":".join(str(name).rsplit(".", 1)))


def _walk(key: str, value: Any, arguments: Any = None) -> Iterator[Value]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            beside = {other: given for other, given in value.items() if other != name}
            called = name in ("module", "name", "type", "schedule")
            if name in SWITCHES:
                yield Value(f"{key}.{name}", item)
            else:
                yield from _walk(f"{key}.{name}", item, beside.get("arguments", beside) if called else None)
            if ":" in str(name):
                yield Value(key, name, item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(key, item)
    else:
        yield Value(key, value, arguments)


def is_import_key(key: str) -> bool:
    """Whether fastloop imports the value of a key."""
    return IMPORT_KEYS.fullmatch(key) is not None


def refused_value(value: Value, recipe: Recipe) -> str | None:
    """Why a value makes a library run code that is not installed; None: it does not."""
    name = value.key.rpartition(".")[2]
    if name in SWITCHES:
        safe, why = SWITCHES[name]
        return None if value.value is safe else f"{why}, and that code is not installed. Expected {str(safe).lower()}"
    if not isinstance(value.value, str):
        return None
    if name == "attn_implementation":
        if "/" in value.text:
            return "downloads a kernel from the hub and runs it"
        if value.text.startswith("flash_attention") and _is_installed("kernels"):
            return "may download a kernel from the hub and run it, since the package kernels is installed"
    if value.key != "model.weights" and Path(value.text).suffix.lower() in PICKLES:
        return (
            "a file that may hold pickles, which can run any code. Only model.weights reads such files without "
            "running code"
        )
    return None


def files_of(recipe: Recipe, values: list[Value]) -> Iterator[dict[str, str]]:
    """Each file, folder, URL and hub name: ``{key, what, use}``."""
    for value in values:
        text = value.value
        if not isinstance(text, str):
            continue
        if "://" in text:
            yield {"key": value.key, "what": text, "use": "may open the URL"}
        elif HUB_KEYS.fullmatch(value.key) and not recipe.find(text).exists():
            given = recipe.model.get("revision") if value.key.startswith("model") else None
            revision = f" at revision {given}" if given else ", in its newest revision, which may change"
            yield {"key": value.key, "what": f"{text}{revision}", "use": "downloads from the hub"}
        elif PATH_KEYS.fullmatch(value.key) or HUB_KEYS.fullmatch(value.key) or _is_path(text, recipe):
            yield {"key": value.key, "what": str(recipe.find(text).absolute()), "use": "reads"}
    if recipe.source is not None:
        yield {"key": "recipe", "what": str(recipe.source.absolute()), "use": "reads"}
    yield from ({"key": "extends", "what": str(file), "use": "reads"} for file in recipe.parents)
    yield {"key": "output", "what": str(Path(recipe.output).expanduser().absolute()), "use": "writes"}


def _is_path(text: str, recipe: Recipe) -> bool:
    """Whether a text of an unknown key looks like a path, and leads to a file."""
    return bool({"/", "."} & set(text)) and "\0" not in text and len(text) < 4096 and recipe.find(text).exists()


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
