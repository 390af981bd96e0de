"""A digest of a sample, by which processes compare the data that they read."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fastloop.distributed.tensors import as_bytes

DIGITS = 12
"""Hexadecimal digits of a digest: 48 bits."""


def sample_digest(sample: Any) -> str:
    """A digest of the tensors, arrays, numbers and texts of a sample. Of any other value, only the class counts."""
    values, structure = tree_flatten(sample)
    digest = hashlib.sha256(str(structure).encode())
    for value in values:
        if isinstance(value, Tensor):
            value = as_bytes(value).cpu().numpy()
        if isinstance(value, np.ndarray) and value.dtype.kind != "O":
            part = value.tobytes()
        elif isinstance(value, str | bytes | bool | int | float | None):
            part = repr(value).encode()
        else:
            part = type(value).__qualname__.encode()
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:DIGITS]
