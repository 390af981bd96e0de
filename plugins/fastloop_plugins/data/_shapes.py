"""Padding multiples that keep the number of shapes small. Does not import torch."""

from __future__ import annotations

MULTIPLE = 64
"""Tokens: lengths are padded to a multiple of this. On Hopper, torch prefers cuDNN's attention, which spends tens of
milliseconds to plan each new shape. Texts of up to 512 tokens then have 8 widths."""
SHAPES = 12
"""Largest number of different widths of packed rows in an epoch. Each width needs its own CUDA graph."""
MORE_TOKENS = 0.02
"""Largest share of padding in packed rows on a CPU. oneDNN compiles its products for each width, and keeps a thousand
of them; blocks of few sizes also fill the memory better."""


def multiple_for(rows: list[int], unit: int) -> int:
    """The smallest multiple of ``unit`` for which rows with these numbers of tokens have at most ``SHAPES`` different
    widths."""
    multiple, different = unit, set(rows)
    while len({-(-row // multiple) for row in different}) > SHAPES:
        multiple += unit
    return multiple


def cheap_multiple(rows: list[int]) -> int:
    """The largest of 64, 32, 16 and 8 that adds at most ``MORE_TOKENS`` to rows with these tokens; else 1."""
    most = MORE_TOKENS * sum(rows)
    return next((multiple for multiple in (64, 32, 16, 8) if sum(-row % multiple for row in rows) <= most), 1)
