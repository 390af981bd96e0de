"""Padding multiples on CUDA that keep the number of shapes small. Does not import torch."""

from __future__ import annotations

MULTIPLE = 64
"""Tokens: lengths are padded to a multiple of this. On Hopper, torch prefers cuDNN's attention, which spends tens of
milliseconds to plan each new shape. Texts of up to 512 tokens then have 8 widths."""
SHAPES = 12
"""Largest number of different widths of packed rows in an epoch. Each width needs its own CUDA graph."""


def multiple_for(rows: list[int], unit: int) -> int:
    """The smallest multiple of ``unit`` for which rows with these numbers of tokens have at most ``SHAPES`` different
    widths."""
    multiple, different = unit, set(rows)
    while len({-(-row // multiple) for row in different}) > SHAPES:
        multiple += unit
    return multiple
