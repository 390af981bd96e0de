"""How many tokens to pad to on CUDA, so that there are few shapes. Kept free of torch."""

from __future__ import annotations

MULTIPLE = 64
"""Tokens: lengths are padded to a multiple of this. On Hopper torch prefers cuDNN's attention, which plans each new shape for tens of
milliseconds. Texts of up to 512 tokens then have 8 widths."""
SHAPES = 12
"""Different numbers of tokens of an epoch's packed rows, at most: each is another CUDA graph."""


def multiple_for(rows: list[int], unit: int) -> int:
    """The smallest multiple of ``unit`` that leaves rows of these numbers of tokens at most ``SHAPES`` different widths."""
    multiple, different = unit, set(rows)
    while len({-(-row // multiple) for row in different}) > SHAPES:
        multiple += unit
    return multiple
