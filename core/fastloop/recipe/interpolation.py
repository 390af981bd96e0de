"""Check the interpolations of a recipe (``${train.lr}``) before OmegaConf resolves them.

A recipe is data and has the same meaning on every machine, so resolvers such as ``${oc.env:HOME}`` are
refused. Interpolations of interpolations can grow without bound, so ``measure`` computes the size of all values first.
"""

from __future__ import annotations

import re
from typing import Any

from fastloop.errors import RecipeError

MAX_SIZE = 1_000_000
"""Maximum characters of all values, with expanded interpolations. A value counts as one more, and an interpolation as
100 more."""
LONGEST_FOUND = 60
"""Characters of a text in a message, at most."""
_RESOLVER = re.compile(r"\$\{[^}]*?[:$][^}]*\}*")
_REFERENCE = re.compile(r"\$\{\s*(\.*)([^{}]*)\}")


def measure(tree: Any, where: str, path: tuple[Any, ...], sizes: dict[tuple[Any, ...], int]) -> int:
    """The size of the value at a path, after interpolation; 0 if there is none, or in a circle: OmegaConf refuses both.

    Args:
        where: The recipe, for messages.
        path: Keys of mappings and numbers of list items: ``("plugins", "amp", "dtype")``.
        sizes: The size of each path that is known. Gets more of them.

    Raises:
        RecipeError: A resolver is in the value, OmegaConf cannot read an interpolation, or the value is larger than
            ``MAX_SIZE``; names the key.
        RecursionError: A chain of interpolations is too long.
    """
    if path in sizes:
        return sizes[path]
    value = tree
    for depth, key in enumerate(path):
        if isinstance(value, str):  # an interpolation of a mapping, and a key of that mapping
            return measure(tree, where, path[:depth], sizes)
        try:
            value = value[int(key)] if isinstance(value, list) or key not in value else value[key]
        except (LookupError, TypeError, ValueError):
            return 0
    place = f"{where}{_key(path)}"
    size = 1
    sizes[path] = 0  # while it is computed
    if isinstance(value, str):
        parts = _references(value, path, place)
        size += len(value) + 100 * len(parts)
    elif isinstance(value, list):
        parts = [(*path, index) for index in range(len(value))]
    elif isinstance(value, dict):
        parts = [(*path, key) for key in value]
    else:
        parts = []
    size += sum(measure(tree, where, part, sizes) for part in parts)
    sizes[path] = size
    if size > MAX_SIZE:
        raise RecipeError(
            f"more than {MAX_SIZE:,} characters, with expanded ${{...}}.",
            code="too-large",
            place=place,
            remedy="Shorten it, or use ${...} less often.",
        )
    return size


def _key(path: tuple[Any, ...]) -> str:
    """A path for messages, behind the recipe: ``: data.files[0]``; empty for the whole recipe."""
    key = ""
    for part in path:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}" if key else f" {part}"
    return f":{key}" if path else ""


def _find_refused(text: str) -> str | None:
    """The resolver in a text, or the text from its first ``${`` on if OmegaConf cannot read it; None: all is well."""
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse

    if "${" not in text:
        return None
    resolver = _RESOLVER.search(text)
    if resolver is not None:
        return resolver[0]
    try:
        parse(text)
    except GrammarParseError:
        return text[text.index("${") :][:LONGEST_FOUND]
    return None


def _references(text: str, path: tuple[Any, ...], place: str) -> list[tuple[Any, ...]]:
    """The paths that the interpolations of a text stand for.

    At ``("train", "lr")``, ``${data.name}`` is ``("data", "name")``. Each dot at the start is one step up:
    ``${.seed}`` is ``("train", "seed")``.

    Raises:
        RecipeError: A resolver is in the text, or an interpolation that OmegaConf cannot read.
    """
    refused = _find_refused(text)
    if refused is not None:
        raise RecipeError(
            code="wrong-format",
            place=place,
            found=repr(refused),
            expected="${...} with the name of another key of the recipe in it, and no more",
        )
    references = []
    for dots, name in _REFERENCE.findall(text):
        start = path[: -len(dots)] if dots else ()
        references.append((*start, *re.findall(r"[^][.\s]+", name)))
    return references
