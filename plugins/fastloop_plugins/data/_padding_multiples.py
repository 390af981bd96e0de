"""Multiples that plugins choose, so that padded lengths have few shapes. Does not import torch.

``fastloop_plugins.text.batches.Width`` pads to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

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
    widths. With rows of 60, 65 and 130 tokens and a multiple of 64, these are 64, 128 and 192."""
    lengths = set(rows)
    multiple = unit
    while count_widths(lengths, multiple) > SHAPES:
        multiple += unit
    return multiple


def count_widths(lengths: Iterable[int], multiple: int) -> int:
    """How many different widths rows have that are padded to a multiple."""
    return len({math.ceil(length / multiple) for length in lengths})


def cheap_multiple(rows: list[int]) -> int:
    """The largest of 64, 32, 16 and 8 that adds at most ``MORE_TOKENS`` to rows with these tokens; else 1."""
    allowed = MORE_TOKENS * sum(rows)
    for multiple in (64, 32, 16, 8):
        added = sum(-row % multiple for row in rows)  # 60 tokens and a multiple of 64: 4
        if added <= allowed:
            return multiple
    return 1
