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
_RESOLVER = re.compile(r"\$\{[^}]*?[:$][^}]*\}*")
_REFERENCE = re.compile(r"\$\{\s*(\.*)([^{}]*)\}")


def measure(tree: Any, where: str, path: tuple[Any, ...], sizes: dict[tuple[Any, ...], int]) -> int:
    """The size of the value at a path, after interpolation; 0 if there is none, or in a circle: OmegaConf refuses both.

    Args:
        sizes: The size of each path that is known. Gets more of them.

    Raises:
        RecipeError: A resolver is in the value, or the value is larger than ``MAX_SIZE``; names the key.
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
    place = (
        where
        + ":" * bool(path)
        + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).replace(".", " ", 1)
    )
    parts = [
        (*path, key)
        for key in (range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ())
    ]
    sizes[path] = size = 0  # while it is computed
    if isinstance(value, str):
        if found := _RESOLVER.search(value):
            raise RecipeError(
                code="wrong-format",
                place=place,
                found=repr(found[0]),
                expected="${...} with the name of another key of the recipe in it, and no more",
            )
        parts = [
            (*path[: -len(dots) if dots else 0], *re.findall(r"[^][.\s]+", name))
            for dots, name in _REFERENCE.findall(value)
        ]
        size = len(value) + 100 * len(parts)
    sizes[path] = size = 1 + size + sum(measure(tree, where, part, sizes) for part in parts)
    if size > MAX_SIZE:
        raise RecipeError(
            f"more than {MAX_SIZE:,} characters, with expanded ${{...}}.",
            code="too-large",
            place=place,
            remedy="Shorten it, or use ${...} less often.",
        )
    return size
